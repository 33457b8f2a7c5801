"""An executor hangs when it is silent, or its engine stands still; the gateway's own delays count
for nothing.
"""

from services.gateway.errors import EngineStalledError, LinkStalledError
from services.gateway.executors.heartbeat import CHECK_INTERVAL_S, Heartbeat, StallLimits

LIMITS = StallLimits(link_s=3.0, engine_s=60.0)


class Watched:
    """An executor that is looked at as often as it should be."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.heartbeat = Heartbeat(LIMITS, 0.0)

    def looked_at(
        self, for_s: float, *, is_live: bool = True, is_waited_for: bool = True, steps: int | None
    ) -> LinkStalledError | None:
        """Look for so long, with a frame before each look unless `steps` is None."""
        fault = None
        for _ in range(round(for_s / CHECK_INTERVAL_S)):
            self.now_s += CHECK_INTERVAL_S
            if steps is not None:
                self.heartbeat.took(steps, self.now_s)
            fault = self.heartbeat.fault(self.now_s, is_live=is_live, is_waited_for=is_waited_for)
        return fault


def test_silence_is_a_fault_after_three_seconds() -> None:
    watched = Watched()
    assert not watched.looked_at(1.0, steps=1)
    assert not watched.looked_at(3.0, steps=None)
    fault = watched.looked_at(0.5, steps=None)
    assert str(fault) == "no message came for 3 s"
    assert not isinstance(fault, EngineStalledError)


def test_an_executor_that_never_said_how_many_steps_there_are_may_be_silent() -> None:
    watched = Watched()
    watched.heartbeat.took(None, 0.0)
    assert not watched.looked_at(600.0, steps=None)


def test_an_engine_that_has_not_made_a_step_yet_is_watched_as_any_other() -> None:
    watched = Watched()
    assert not watched.looked_at(60.0, steps=0)
    assert isinstance(watched.looked_at(1.0, steps=0), EngineStalledError)
    silent = Watched()
    assert not silent.looked_at(1.0, steps=0)
    assert silent.looked_at(3.5, steps=None)


def test_one_without_requests_may_be_silent() -> None:
    watched = Watched()
    watched.looked_at(1.0, steps=1)
    assert not watched.looked_at(600.0, is_live=False, is_waited_for=False, steps=None)
    assert not watched.looked_at(3.0, steps=None)  # from its first request on it counts
    assert watched.looked_at(0.5, steps=None)


def test_an_engine_that_stands_still_while_readers_wait_is_a_fault_after_a_minute() -> None:
    watched = Watched()
    assert not watched.looked_at(60.0, steps=1)
    fault = watched.looked_at(1.0, steps=1)
    assert str(fault) == "its engine made no step for 60 s"
    assert isinstance(fault, EngineStalledError)


def test_an_engine_that_makes_steps_or_need_not_is_none() -> None:
    watched = Watched()
    for steps in range(1, 10):
        assert not watched.looked_at(50.0, steps=steps)
    assert not watched.looked_at(600.0, is_waited_for=False, steps=9)
    assert not watched.looked_at(60.0, steps=9)  # from the first reader that waits on it counts
    assert watched.looked_at(1.0, steps=9)


def test_the_time_by_which_a_look_comes_late_does_not_count() -> None:
    watched = Watched()
    watched.looked_at(1.0, steps=1)
    watched.now_s += 100.0
    assert not watched.looked_at(3.0, steps=None)
    assert watched.looked_at(0.5, steps=None)


def test_silence_is_a_fault_though_each_look_comes_late() -> None:
    watched = Watched()
    watched.looked_at(1.0, steps=1)
    faults = []
    for _ in range(7):
        watched.now_s += 2.0
        faults.append(watched.looked_at(CHECK_INTERVAL_S, steps=None))
    assert [bool(fault) for fault in faults] == [False] * 6 + [True]


def test_what_is_read_behind_a_late_look_is_news() -> None:
    watched = Watched()
    watched.looked_at(1.0, steps=1)
    for steps in range(2, 30):
        watched.now_s += 2.5
        assert not watched.looked_at(CHECK_INTERVAL_S, steps=None)
        assert not watched.looked_at(CHECK_INTERVAL_S, steps=steps)
