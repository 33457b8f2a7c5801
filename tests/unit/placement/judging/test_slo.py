"""When tokens of a decode window are late."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.planning.snapshots import make_request
from services.placement.judging.slo import (
    PromisedPace,
    constant_step_rate,
    late_tokens,
    misses,
    promise_of,
    violations_allowed,
)
from services.placement.types import PolicyParameters

STEP_S = 0.5


@pytest.mark.parametrize(
    ("slack_s", "step_s", "expected"),
    [
        (0.0, 1.0, 0),  # exactly on time
        (0.0, 1.01, 4),
        (0.5, 1.25, 2),  # 0.25 s lost per token: 0.25, 0.5 covered, then late
        (0.4, 1.25, 3),
        (9.0, 1.25, 0),
    ],
)
def test_late_tokens_of_four_equal_steps(slack_s, step_s, expected) -> None:
    promise = PromisedPace(interval_s=1.0, slack_s=slack_s)

    assert promise.num_late(step_s, 4) == expected
    assert sum(late_tokens([promise], [step_s] * 4)) == expected


def test_a_late_token_moves_the_readers_clock() -> None:
    # S = 1. Due at 1; written at 3: late. Next due at 4, written at 4: on time; then 4.5, 5.5.
    late = late_tokens([PromisedPace(interval_s=1.0, slack_s=0.0)], [3.0, 1.0, 0.5, 2.0])

    assert late == [1, 0, 0, 1]  # the last is written at 6.5 and was due at 6


DURATIONS = st.floats(0.0, 3.0)
PROMISES = st.builds(PromisedPace, interval_s=st.floats(0.1, 2.0), slack_s=st.floats(0.0, 4.0))


@given(
    promises=st.lists(PROMISES, max_size=4),
    least_s=DURATIONS,
    extra_s=st.lists(DURATIONS, min_size=1, max_size=8),
)
def test_no_sequence_of_longer_steps_has_fewer_late_tokens(promises, least_s, extra_s) -> None:
    steps_s = [least_s + extra for extra in extra_s]
    bound = constant_step_rate(promises, least_s * (1 - 1e-9), len(steps_s))

    assert bound * len(steps_s) <= sum(late_tokens(promises, steps_s)) + 1e-9


def test_the_promise_is_backed_by_the_deposit_less_the_age_of_the_last_release() -> None:
    request = make_request("a", slo_tbt_s=0.5, num_deposited_tokens=3, last_release_age_s=0.2)

    backed = promise_of(request, deposit=True)
    bare = promise_of(request, deposit=False)

    assert backed is not None
    assert bare is not None
    assert (backed.interval_s, backed.slack_s) == (0.5, pytest.approx(1.3))
    assert bare.slack_s == 0.0
    assert promise_of(make_request("b"), deposit=True) is None


@pytest.mark.parametrize("num_deposited_tokens", [0, 1])
def test_what_a_reader_has_lost_already_is_no_violation_of_a_plan(num_deposited_tokens) -> None:
    overdue = make_request(
        "a",
        slo_tbt_s=0.5,
        num_deposited_tokens=num_deposited_tokens,
        last_release_age_s=1.2,
    )

    promise = promise_of(overdue, deposit=True)

    assert promise == PromisedPace(interval_s=0.5, slack_s=0.0)
    assert promise.num_late(0.5, 4) == 0
    assert promise.num_late(0.51, 4) == 4


@pytest.mark.parametrize(
    ("alpha", "num_running", "num_missed", "expected"),
    [
        (1.0, 2, 0, 1.0),
        (1.0, 1, 0, 0.0),  # alpha counts only in batches larger than it
        (1.0, 1, 1, 0.0),
        (2.0, 3, 1, 1.0),
        (2.0, 3, 3, 0.0),
        (0.0, 3, 0, 0.0),
        (0.5, 1, 0, 0.5),
    ],
)
def test_paused_readers_that_run_dry_use_up_alpha(alpha, num_running, num_missed, expected) -> None:
    parameters = PolicyParameters(alpha=alpha)

    allowed = violations_allowed(parameters, num_running=num_running, num_missed=num_missed)

    assert allowed == expected


def test_a_paused_reader_misses_when_its_cover_is_shorter_than_the_window() -> None:
    promise = PromisedPace(interval_s=0.5, slack_s=1.0)

    assert not misses(promise, window_s=1.5)
    assert misses(promise, window_s=1.6)
    assert not misses(None, window_s=100.0)


def test_where_drafts_are_accepted_a_step_may_take_as_long_as_the_tokens_that_it_brings() -> None:
    request = make_request("a", slo_tbt_s=0.1, num_deposited_tokens=5, last_release_age_s=0.2)
    one = promise_of(request, deposit=True)
    drafted = promise_of(replace(request, tokens_per_step=2.5), deposit=True)

    assert one is not None
    assert drafted is not None
    assert drafted.interval_s == pytest.approx(0.25)
    assert drafted.slack_s == pytest.approx(one.slack_s)  # deposits are read token by token
    assert (one.num_late(0.24, 8), drafted.num_late(0.24, 8)) == (6, 0)
