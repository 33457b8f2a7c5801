"""When measured and predicted steps differ enough to plan anew."""

import pytest

from services.control.measures.prediction import MIN_GAP_STEPS, NUM_STEPS, MismatchDetector


def alarms(detector: MismatchDetector, ratios: list[float]) -> list[int]:
    """Return the indexes of the steps that raised an alarm."""
    return [
        index
        for index, ratio in enumerate(ratios)
        if detector.add(measured_s=ratio * 0.01, predicted_s=0.01)
    ]


@pytest.mark.parametrize("ratio", [2.0, 0.5])
def test_steady_deviation_raises_one_alarm(ratio: float) -> None:
    assert alarms(MismatchDetector(0.15), [ratio] * 100) == [NUM_STEPS - 1]


def test_agreement_raises_none() -> None:
    assert alarms(MismatchDetector(0.15), [1.14, 0.86] * 50) == []


def test_a_single_slow_step_is_noise() -> None:
    assert alarms(MismatchDetector(0.15), ([1.0] * 7 + [9.0]) * 10) == []


def test_the_next_alarm_needs_agreement_in_between() -> None:
    spell = [2.0] * 30
    wavering = [1.1] * 30  # within the threshold, not within half of it
    agreeing = [1.0] * 30

    assert len(alarms(MismatchDetector(0.15), spell + wavering + spell)) == 1
    assert len(alarms(MismatchDetector(0.15), spell + agreeing + spell)) == 2


def test_a_new_prediction_may_be_wrong_again_but_not_at_once() -> None:
    detector = MismatchDetector(0.15)
    assert alarms(detector, [2.0] * NUM_STEPS) == [NUM_STEPS - 1]

    detector.restart()

    assert alarms(detector, [2.0] * 100)[0] == MIN_GAP_STEPS - 1


def test_zero_switches_it_off() -> None:
    assert alarms(MismatchDetector(0.0), [5.0] * 100) == []
