"""Holds: one per request, idempotent, and none for ever."""

from services.control.counters import Counters
from services.control.requests.holds import Holds
from services.control.requests.request_record import HoldKind
from tests.unit.records import make_record


class Bench:
    """Holds of two requests, on a clock that stands still."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.a, self.b = make_record("a"), make_record("b")
        self.counters = Counters()
        self.holds = Holds(
            {"a": self.a, "b": self.b}, self.counters, clock=lambda: self.now_s, max_hold_s=10.0
        )


def test_pausing_twice_is_pausing_once() -> None:
    bench = Bench()

    bench.holds.pause(bench.a)
    bench.holds.pause(bench.a)

    assert bench.holds.ids(HoldKind.PAUSE) == {"a"}
    assert bench.counters.num_pauses == 1


def test_a_paused_request_can_be_parked_but_not_the_other_way_round() -> None:
    bench = Bench()

    bench.holds.pause(bench.a)
    bench.holds.park(bench.a)
    bench.holds.pause(bench.a)

    assert bench.holds.ids(HoldKind.PARK) == {"a"}
    assert bench.holds.ids(HoldKind.PAUSE) == set()
    assert (bench.counters.num_pauses, bench.counters.num_parks) == (1, 1)


def test_a_hold_ends_by_itself_at_its_bound_and_not_before() -> None:
    bench = Bench()
    bench.holds.pause(bench.a)
    bench.now_s += 4.0
    bench.holds.pause(bench.b)

    bench.now_s += 5.9
    bench.holds.release_overdue()
    assert bench.a.is_held
    bench.now_s += 0.1  # ten seconds after a, six after b
    bench.holds.release_overdue()

    assert not bench.a.is_held
    assert bench.b.is_held
    assert bench.counters.num_overdue_holds == 1


def test_parking_a_paused_request_does_not_start_its_bound_anew() -> None:
    bench = Bench()
    bench.holds.pause(bench.a)
    bench.now_s += 9.0
    bench.holds.park(bench.a)
    bench.now_s += 1.0

    bench.holds.release_overdue()

    assert not bench.a.is_held
