"""What is remembered of an engine between two updates."""

from typing import Any

import pytest

from cli.client.engine_watch import NUM_STEPS_KEPT, EngineState
from evenflow.executor.v1 import executor_pb2 as pb


def make_request(request_id: str = "a", **overrides: Any) -> pb.ObservedRequest:
    fields: dict[str, Any] = {
        "state": pb.REQUEST_STATE_DECODING,
        "num_prompt_tokens": 7,
        "num_generated_tokens": 11,
        "num_delivered_tokens": 1,
        "num_deposited_tokens": 8,
        "release_interval_s": 0.5,
        "pace_tail": True,
    }
    return pb.ObservedRequest(request_id=request_id, **{**fields, **overrides})


def make_state(*requests: pb.ObservedRequest, **fields: Any) -> EngineState:
    state = EngineState()
    state.take(pb.WatchRequestsResponse(requests=requests, **fields), now_s=10.0)
    return state


def shown(state: EngineState) -> list[tuple[str, int, bool]]:
    return [(row.request.request_id, row.num_deposited, row.is_ended) for row in state.rows]


def test_delivered_is_what_is_not_in_the_deposit_whatever_the_last_count_was() -> None:
    (row,) = make_state(make_request()).rows

    assert (row.num_delivered, row.num_deposited) == (3, 8)


def test_a_reader_who_keeps_the_pace_is_shown_until_the_deposit_is_read_out() -> None:
    state = make_state(make_request("a"), make_request("b"))

    state.take(pb.WatchRequestsResponse(requests=[make_request("b")]), now_s=10.0)
    assert shown(state) == [("b", 8, False), ("a", 8, True)]
    state.take(pb.WatchRequestsResponse(), now_s=11.2)  # two more tokens at 0.5 s each
    assert shown(state) == [("a", 6, True), ("b", 8, True)]
    state.take(pb.WatchRequestsResponse(), now_s=14.0)
    assert shown(state) == [("b", 3, True)]
    state.take(pb.WatchRequestsResponse(), now_s=16.0)
    assert shown(state) == []


def test_without_a_paced_tail_a_request_is_gone_when_it_ends() -> None:
    state = make_state(make_request("flushed", pace_tail=False))
    state.take(pb.WatchRequestsResponse(), now_s=10.1)

    assert shown(state) == []


def test_a_step_is_remembered_once_and_not_for_ever() -> None:
    state = EngineState()
    for num_steps in (1, 1, 2, *range(3, 200)):
        update = pb.WatchRequestsResponse(num_steps=num_steps, observed_step_s=float(num_steps))
        state.take(update, now_s=0.0)
        if num_steps == 2:
            assert list(state.observed_s) == [1.0, 2.0]

    assert len(state.observed_s) == NUM_STEPS_KEPT


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"num_late_tokens": 0}, 1.0, id="all-in-time"),
        pytest.param({"num_late_tokens": 4}, 0.6, id="the-first-token-has-no-gap"),  # 1 - 4 / 10
        pytest.param({"release_interval_s": 0.0}, None, id="no-pace"),
        pytest.param({"num_generated_tokens": 1}, None, id="no-gap-yet"),
    ],
)
def test_attainment_is_the_share_of_gaps_in_time(
    fields: dict[str, Any], expected: float | None
) -> None:
    (row,) = make_state(make_request(**fields)).rows

    assert row.attainment == expected


def test_overall_attainment_weighs_requests_by_their_tokens() -> None:
    state = make_state(
        make_request("a", num_generated_tokens=31, num_late_tokens=0),
        make_request("b", num_generated_tokens=11, num_late_tokens=10),
        make_request("unpaced", release_interval_s=0.0),
    )

    assert state.attainment == pytest.approx(30 / 40)
    assert make_state().attainment is None
