"""The window: what a placement's steps say about how long to hold it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.placement.judging.slo import PromisedPace
from services.planner.policy.window import Course, Fit, Promises, fit_window, num_late

pytestmark = pytest.mark.timeout(3_600)  # the first run compiles the kernels

SECONDS = st.floats(1e-4, 10.0)


@given(
    readers=st.lists(st.tuples(SECONDS, st.floats(0.0, 50.0)), max_size=6),
    step_s=SECONDS,
    window=st.integers(1, 4_096),
)
def test_late_tokens_are_counted_as_the_promises_say(readers, step_s, window) -> None:
    expected = sum(
        PromisedPace(interval_s=interval_s, slack_s=slack_s).num_late(step_s, window)
        for interval_s, slack_s in readers
    )
    table = np.array(readers, dtype=np.float64).reshape(-1, 2)
    promises = Promises(table[:, 0].copy(), table[:, 1].copy())

    assert num_late(promises, step_s, window) == expected


def test_a_step_a_hair_above_the_slo_is_covered_by_any_slack() -> None:
    interval_s = 5e-324
    promises = Promises(np.array([interval_s]), np.array([1e300]))

    assert num_late(promises, 1e-323, 7) == 0
    assert PromisedPace(interval_s=interval_s, slack_s=1e300).num_late(1e-323, 7) == 0


def fit(steps_s: list[float], **overrides) -> Fit:
    count = len(steps_s)
    course = Course(
        steps_s=np.array(steps_s),
        blocks=np.array(overrides.pop("blocks", [1.0] * count)),
        late=np.array(overrides.pop("late", [0] * count)),
    )
    given = {"capacity": 10.0, "late_per_step": 0.0, "switch_s": 0.0} | overrides
    return fit_window(course, [1, 2, 4], **given)


def test_of_equal_costs_the_longest_window_is_taken() -> None:
    found = fit([0.010, 0.010, 0.010, 0.010])

    assert (found.window, found.expires_after, found.keeps_slo) == (4, 4, True)
    assert found.mean_step_s == pytest.approx(0.010)


def test_a_switching_cost_is_worth_it_over_many_steps_only() -> None:
    # Windows cost 10 + 8 / 1, 15 + 8 / 2 and 25 + 8 / 4 ms; without switching 10, 15 and 25.
    steps_s = [0.010, 0.020, 0.030, 0.040]

    assert fit(steps_s).window == 1
    assert fit(steps_s, switch_s=0.008).cost_s == pytest.approx(0.018)
    assert fit(steps_s, switch_s=0.012).window == 2  # 22, 21, 28


def test_windows_end_before_the_pool_does() -> None:
    found = fit([0.01] * 4, blocks=[9.0, 10.0, 10.0, 11.0])

    assert (found.window, found.expires_after) == (2, 3)


def test_no_window_where_the_first_step_does_not_fit() -> None:
    assert fit([0.01] * 4, blocks=[11.0] * 4).window == 0


def test_a_window_that_keeps_the_slo_is_preferred_and_expires_at_the_first_breach() -> None:
    # Of four steps the third is late: 0, 0, 1/3, 1/4 per step.
    found = fit([0.04, 0.03, 0.01, 0.01], late=[0, 0, 1, 0])

    assert (found.window, found.keeps_slo, found.expires_after) == (2, True, 2)


def test_where_no_window_keeps_the_slo_the_cheapest_is_taken() -> None:
    found = fit([0.04, 0.03, 0.02, 0.01], late=[1, 1, 1, 1])

    assert (found.window, found.keeps_slo, found.expires_after) == (4, False, 4)
