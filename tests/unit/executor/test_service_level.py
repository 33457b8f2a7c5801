"""The tag survives the way through vLLM's extra_args."""

import json

from services.executor.service_level import NO_TAG, RequestTag, from_extra_args, to_extra_args
from services.pacing.types import ServiceLevel

TAG = RequestTag(
    service_level=ServiceLevel(slo_tbt_s=0.2, consumption_rate_tps=8.0, pace_tail=True),
    generation=3,
)


def test_a_tag_comes_back_from_plain_values() -> None:
    # vLLM sends extra_args as msgpack, which like JSON knows plain values only.
    assert from_extra_args(json.loads(json.dumps(to_extra_args(TAG)))) == TAG


def test_a_request_of_another_front_has_no_tag() -> None:
    assert from_extra_args(None) == NO_TAG
    assert from_extra_args({"kv_transfer_params": {}}) == NO_TAG
