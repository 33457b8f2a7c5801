"""What a request was promised, and why a token is late, survive the way through vLLM."""

import json

import pytest

from services.executor.request_tag import (
    Begun,
    begun_of,
    fairness_id_of,
    from_extra_args,
    from_transfer_params,
    reads_from_first,
    to_extra_args,
    to_transfer_params,
    with_begun,
    with_fairness_id,
)
from services.pacing.cause import Cause, Delay
from services.pacing.types import NO_SERVICE_LEVEL, Release, ServiceLevel

PROMISE = ServiceLevel(
    slo_tbt_s=0.2, consumption_rate_tps=8.0, pace_tail=True, release=Release.AT_ONCE
)


def test_a_promise_comes_back_from_plain_values() -> None:
    # vLLM sends extra_args as msgpack, which like JSON knows plain values only.
    assert from_extra_args(json.loads(json.dumps(to_extra_args(PROMISE)))) == PROMISE


def test_a_request_of_another_front_was_promised_nothing() -> None:
    assert from_extra_args(None) == NO_SERVICE_LEVEL
    assert from_extra_args({"kv_transfer_params": {}}) == NO_SERVICE_LEVEL


@pytest.mark.parametrize("cause", Cause)
def test_a_delay_comes_back_from_plain_values(cause: Cause) -> None:
    delay = Delay(cause, 0.25)

    assert from_transfer_params(json.loads(json.dumps(to_transfer_params(delay)))) == delay


def test_an_output_of_another_connector_has_no_delay() -> None:
    assert from_transfer_params(None) is None
    assert from_transfer_params({"do_remote_prefill": True}) is None


def test_whether_tokens_are_read_from_the_first_on_reaches_the_scheduler() -> None:
    assert not reads_from_first(to_extra_args(PROMISE, reads=False))
    assert reads_from_first(to_extra_args(PROMISE))
    assert reads_from_first(None)


def test_a_fairness_id_reaches_the_scheduler_and_none_leaves_no_trace() -> None:
    plain = to_extra_args(PROMISE)
    tagged = json.loads(json.dumps(with_fairness_id(plain, "alice")))

    assert (fairness_id_of(tagged), from_extra_args(tagged)) == ("alice", PROMISE)
    assert (fairness_id_of(plain), fairness_id_of(None)) == ("", "")
    assert with_fairness_id(plain, "") == plain


def test_what_an_answer_has_already_comes_back_from_plain_values() -> None:
    begun = Begun([5, 6], 1, -0.5, 3.0)
    extra_args = json.loads(json.dumps(with_begun(to_extra_args(PROMISE), begun, reads=False)))

    assert begun_of(extra_args) == begun
    assert from_extra_args(extra_args) == PROMISE
    assert not reads_from_first(extra_args)
    assert begun_of(to_extra_args(PROMISE)) is None
    assert begun_of(None) is None
