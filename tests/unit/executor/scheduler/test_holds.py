"""Holds: one per request, idempotent, and none for ever."""

from services.control.counters import Counters
from services.executor.scheduler.holds import HoldKind, Holds


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_holds(max_hold_s: float = 10.0) -> tuple[Holds, ManualClock]:
    clock = ManualClock()
    return Holds(Counters(), clock=clock, max_hold_s=max_hold_s), clock


def test_pausing_twice_is_pausing_once() -> None:
    holds, _ = make_holds()

    holds.pause("a")
    holds.pause("a")

    assert holds.ids(HoldKind.PAUSE) == {"a"}
    assert holds.counters.num_pauses == 1


def test_a_paused_request_can_be_parked_but_not_the_other_way_round() -> None:
    holds, _ = make_holds()

    holds.pause("a")
    holds.park("a")
    holds.pause("a")

    assert holds.kind("a") is HoldKind.PARK
    assert (holds.counters.num_pauses, holds.counters.num_parks) == (1, 1)


def test_a_hold_ends_by_itself_at_its_bound_and_not_before() -> None:
    holds, clock = make_holds(max_hold_s=10.0)
    holds.pause("a")
    clock.now_s += 4.0
    holds.pause("b")

    clock.now_s += 5.9
    assert holds.release_overdue() == []
    clock.now_s += 0.1  # ten seconds after a, six after b
    assert holds.release_overdue() == ["a"]

    assert "a" not in holds
    assert "b" in holds
    assert holds.counters.num_overdue_holds == 1


def test_parking_a_paused_request_does_not_start_its_bound_anew() -> None:
    holds, clock = make_holds(max_hold_s=10.0)
    holds.pause("a")
    clock.now_s += 9.0
    holds.park("a")
    clock.now_s += 1.0

    assert holds.release_overdue() == ["a"]


def test_releasing_what_is_not_held_changes_nothing() -> None:
    holds, _ = make_holds()
    holds.pause("a")

    assert not holds.release("b")
    assert holds.release("a")
    assert not holds.release("a")
