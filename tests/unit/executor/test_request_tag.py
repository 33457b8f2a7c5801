"""What a request was promised survives the way through vLLM's extra_args."""

import json

from services.executor.request_tag import from_extra_args, to_extra_args
from services.pacing.types import NO_SERVICE_LEVEL, ServiceLevel

PROMISE = ServiceLevel(slo_tbt_s=0.2, consumption_rate_tps=8.0, pace_tail=True)


def test_a_promise_comes_back_from_plain_values() -> None:
    # vLLM sends extra_args as msgpack, which like JSON knows plain values only.
    assert from_extra_args(json.loads(json.dumps(to_extra_args(PROMISE)))) == PROMISE


def test_a_request_of_another_front_was_promised_nothing() -> None:
    assert from_extra_args(None) == NO_SERVICE_LEVEL
    assert from_extra_args({"kv_transfer_params": {}}) == NO_SERVICE_LEVEL
