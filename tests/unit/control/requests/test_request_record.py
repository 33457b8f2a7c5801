"""One request, one state: edges, and holds by their reasons."""

from itertools import pairwise, product

import pytest

from services.control.requests.life import EDGES, QUEUED, Hold, State
from tests.unit.records import make_record

LIVES = [
    (State.RUNNING, State.WAITING, State.LOADING, State.READY, State.RUNNING),  # parked
    (State.LOADING, State.WAITING, State.RUNNING),  # put back, then computed anew
    (State.RUNNING, State.PAUSED, State.RUNNING),
    (State.RUNNING, State.LEAVING, State.PAUSED, State.RUNNING),  # called back
]


@pytest.mark.parametrize("life", LIVES)
def test_a_request_goes_on_along_the_edges(life: tuple[State, ...]) -> None:
    record = make_record("a")
    for state in life:
        record.enter(state)
    assert record.state is life[-1]
    assert all(after in EDGES[before] for before, after in pairwise((State.WAITING, *life)))


@pytest.mark.parametrize(
    ("before", "after"),
    [both for both in product(State, State) if both[1] not in EDGES[both[0]]],
)
def test_no_other_edge_is_taken(before: State, after: State) -> None:
    record = make_record("a")
    record.state = before

    with pytest.raises(AssertionError, match="a: "):
        record.enter(after)
    assert record.state is before


def test_a_state_is_left_towards_the_queue_from_everywhere() -> None:
    """Whatever it waits for, its blocks may be taken: no state is a trap."""
    assert all(State.WAITING in EDGES[state] for state in State if state is not State.WAITING)


def test_a_request_is_held_until_no_reason_is_left() -> None:
    record = make_record("a")
    record.hold(Hold.PLAN, 1.0)
    record.hold(Hold.READER, 2.0)
    record.hold(Hold.PLAN, 3.0)  # paused already
    assert (record.is_held, record.held_since_s) == (True, 1.0)

    record.release(Hold.PLAN, 4.0)
    assert (record.is_held, record.held_since_s, record.resumed_s) == (True, 2.0, None)
    record.release(Hold.READER, 5.0)
    record.release(Hold.READER, 6.0)  # reads already

    assert (record.is_held, record.held_since_s, record.resumed_s) == (False, None, 5.0)


def test_a_request_that_leaves_is_held_without_a_reason() -> None:
    record = make_record("a")
    record.enter(State.RUNNING)
    record.enter(State.LEAVING)

    assert record.is_held
    record.preempted()
    assert not record.is_held


def test_parked_is_who_has_run_and_does_not_keep_a_place() -> None:
    record = make_record("a")
    parked_in = set()
    assert not record.is_parked  # it has just arrived
    record.enter(State.RUNNING)
    for state in State:
        record.state = state
        if record.is_parked:
            parked_in.add(state)

    assert parked_in == QUEUED | {State.LEAVING}
