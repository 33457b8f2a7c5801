"""Pauses end without a planner."""

from services.control.plans.plan_in_force import Pause, pauses_to_end


def pause(name: str, age_s: float, priority: int = 0) -> Pause:
    return Pause(request_id=name, age_s=age_s, priority=priority)


def test_nobody_is_paused_longer_than_allowed() -> None:
    pauses = [pause("a", 9.9), pause("b", 10.0), pause("c", 30.0)]

    assert pauses_to_end(pauses, num_running=3, max_pause_s=10.0) == ["b", "c"]


def test_where_only_paused_requests_are_left_one_runs_at_once() -> None:
    pauses = [pause("a", 1.0), pause("b", 2.0)]

    assert pauses_to_end(pauses, num_running=0, max_pause_s=10.0) == ["b"]


def test_the_more_important_one_goes_first() -> None:
    pauses = [pause("a", 1.0, priority=0), pause("b", 2.0, priority=1)]

    assert pauses_to_end(pauses, num_running=0, max_pause_s=10.0) == ["a"]


def test_while_others_run_a_pause_goes_on() -> None:
    assert pauses_to_end([pause("a", 5.0)], num_running=1, max_pause_s=10.0) == []
    assert pauses_to_end([], num_running=0, max_pause_s=10.0) == []
