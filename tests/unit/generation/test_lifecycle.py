"""The life cycle of a request."""

import pytest

from services.generation.lifecycle import EDGES, FINAL_STATES, REACHABLE, RequestStatus

S = RequestStatus
ENDS = {S.FINISHED, S.FAILED, S.CANCELLED}


@pytest.mark.parametrize(
    ("state", "targets"),
    [
        (S.QUEUED, {S.PREFILL}),
        (S.PREFILL, {S.DECODING}),
        (S.DECODING, {S.PAUSED, S.PREEMPTED}),
        (S.PAUSED, {S.DECODING}),
        (S.PREEMPTED, {S.DECODING}),
    ],
)
def test_a_live_state_leads_to_its_neighbours_and_to_every_end(
    state: RequestStatus, targets: set[RequestStatus]
) -> None:
    assert EDGES[state] == targets | ENDS


@pytest.mark.parametrize("state", sorted(ENDS, key=lambda state: state.value))
def test_nothing_follows_an_end(state: RequestStatus) -> None:
    assert not EDGES[state]
    assert not REACHABLE[state]
    assert state in FINAL_STATES


def test_no_live_state_is_final() -> None:
    assert FINAL_STATES == ENDS


@pytest.mark.parametrize(
    ("state", "reachable"),
    [
        (S.QUEUED, {S.PREFILL, S.DECODING, S.PAUSED, S.PREEMPTED}),
        (S.PREFILL, {S.DECODING, S.PAUSED, S.PREEMPTED}),
        (S.DECODING, {S.DECODING, S.PAUSED, S.PREEMPTED}),
        (S.PAUSED, {S.DECODING, S.PAUSED, S.PREEMPTED}),
        (S.PREEMPTED, {S.DECODING, S.PAUSED, S.PREEMPTED}),
    ],
)
def test_skipped_states_are_implied_but_never_gone_back_to(
    state: RequestStatus, reachable: set[RequestStatus]
) -> None:
    assert REACHABLE[state] == reachable | ENDS
