"""The life cycle of a request."""

import pytest

from services.generation.lifecycle import EDGES, FINAL_STATES, RequestStatus

S = RequestStatus
ENDS = {S.FINISHED, S.FAILED, S.CANCELLED}


@pytest.mark.parametrize(("state", "targets"), [(S.QUEUED, {S.DECODING}), (S.DECODING, set())])
def test_a_live_state_leads_forwards_and_to_every_end(
    state: RequestStatus, targets: set[RequestStatus]
) -> None:
    assert EDGES[state] == targets | ENDS


@pytest.mark.parametrize("state", sorted(ENDS, key=lambda state: state.value))
def test_nothing_follows_an_end(state: RequestStatus) -> None:
    assert not EDGES[state]
    assert state in FINAL_STATES


def test_no_live_state_is_final() -> None:
    assert FINAL_STATES == ENDS


@pytest.mark.parametrize("state", list(S))
def test_states_between_may_be_skipped(state: RequestStatus) -> None:
    assert all(EDGES[later] <= EDGES[state] for later in EDGES[state])
