"""Durations of steps, on a clock that the test sets."""

from services.control.measures.step_clock import StepClock


def test_a_step_lasts_from_its_scheduling_to_its_output() -> None:
    clock = StepClock()
    clock.begin(1.0)
    clock.end(1.5, ran=True)
    clock.begin(4.0)  # idle since 1.5
    clock.end(4.25, ran=True)

    assert (clock.num_steps, clock.last_step_s) == (2, 0.25)


def test_a_step_scheduled_ahead_is_not_charged_for_the_one_before() -> None:
    clock = StepClock()
    clock.begin(1.0)
    clock.begin(1.1)
    clock.end(2.0, ran=True)
    clock.end(2.5, ran=True)

    assert clock.last_step_s == 0.5


def test_a_step_without_tokens_leaves_the_duration_of_the_last_real_one() -> None:
    clock = StepClock()
    clock.begin(1.0)
    clock.end(1.5, ran=True)
    clock.begin(2.0)
    clock.end(2.001, ran=False)

    assert (clock.num_steps, clock.last_step_s) == (1, 0.5)
