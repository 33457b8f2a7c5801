"""Token-Deposit: tokens reach the reader one interval apart, never early, as soon as they may."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.pacing.attainment import tpot_s, violates_delivered_tbt
from services.pacing.deposit import (
    ReaderModel,
    due_times_s,
    num_deposited,
    release_interval_s,
)
from services.pacing.types import ServiceLevel

# Eighths of a second are exact in binary, so that sums can be compared without a tolerance.
TICK_S = 0.125
gaps = st.lists(st.integers(min_value=0, max_value=40), min_size=1, max_size=60)
intervals = st.integers(min_value=0, max_value=16).map(lambda n: n * TICK_S)


def times_from(gap_ticks: list[int]) -> list[float]:
    times, now = [], 0
    for gap in gap_ticks:
        now += gap
        times.append(now * TICK_S)
    return times


@pytest.mark.parametrize(
    ("generated_s", "interval_s", "due_s"),
    [
        pytest.param([], 1.0, [], id="no-token"),
        pytest.param([5.0], 1.0, [5.0], id="the-first-token-is-due-when-it-exists"),
        # A burst at 0 leaves one interval apart.
        pytest.param([0.0, 0.0, 0.0], 0.5, [0.0, 0.5, 1.0], id="a-burst-is-spread"),
        # Token 2 at 0.2 waits for 0.5; token 3 comes at 2.0, after 1.0, and is due at once.
        pytest.param([0.0, 0.2, 2.0], 0.5, [0.0, 0.5, 2.0], id="a-gap-is-not-made-up"),
        # The gap from 0.1 to 1.4 is hidden: tokens 2 and 3 leave at 0.5 and 1.0, token 4 at 1.5.
        pytest.param([0.0, 0.1, 0.1, 1.4], 0.5, [0.0, 0.5, 1.0, 1.5], id="the-deposit-hides-a-gap"),
        pytest.param([0.0, 0.1, 0.1], 0.0, [0.0, 0.1, 0.1], id="without-interval-nothing-waits"),
        pytest.param([0.0, 3.0], 3.0, [0.0, 3.0], id="exactly-one-interval-apart"),
    ],
)
def test_due_times_by_hand(generated_s, interval_s, due_s) -> None:
    assert due_times_s(generated_s, interval_s) == due_s


@pytest.mark.parametrize(
    ("flushed_s", "due_s"),
    [
        # Generation ends with the fourth token at 0.3: tokens 2 to 4 need not wait for 1, 2, 3.
        pytest.param(0.3, [0.0, 0.3, 0.3, 0.3], id="the-rest-is-due-at-the-end"),
        pytest.param(1.5, [0.0, 1.0, 1.5, 1.5], id="only-what-still-waits"),
        pytest.param(float("inf"), [0.0, 1.0, 2.0, 3.0], id="a-paced-tail"),
    ],
)
def test_at_the_end_the_rest_is_due_at_once_unless_the_tail_is_paced(flushed_s, due_s) -> None:
    assert due_times_s([0.0, 0.1, 0.2, 0.3], 1.0, flushed_s=flushed_s) == due_s


@given(gaps, intervals)
def test_never_two_tokens_in_one_interval_never_early_order_kept(gap_ticks, interval_s) -> None:
    generated_s = times_from(gap_ticks)

    due_s = due_times_s(generated_s, interval_s)

    assert len(due_s) == len(generated_s)
    assert all(d >= g for g, d in zip(generated_s, due_s, strict=True))
    assert all(b - a >= interval_s for a, b in pairwise(due_s))


@given(gaps, intervals)
def test_each_due_time_is_the_least_that_the_formula_allows(gap_ticks, interval_s) -> None:
    generated_s = times_from(gap_ticks)

    due_s = due_times_s(generated_s, interval_s)

    # Unrolled recursion: d_k = max over j <= k of g_j + (k - j) * S.
    for k, due in enumerate(due_s):
        assert due == max(generated_s[j] + (k - j) * interval_s for j in range(k + 1))


@given(gaps, intervals, st.integers(min_value=0, max_value=600))
def test_a_flush_delays_nothing_and_keeps_order(gap_ticks, interval_s, flush_tick) -> None:
    generated_s = times_from(gap_ticks)
    flushed_s = flush_tick * TICK_S

    due_s = due_times_s(generated_s, interval_s, flushed_s=flushed_s)

    paced_s = due_times_s(generated_s, interval_s)
    assert all(g <= d <= p for g, d, p in zip(generated_s, due_s, paced_s, strict=True))
    assert due_s == sorted(due_s)


@given(gaps, intervals, st.integers(min_value=0, max_value=600))
def test_the_reader_model_agrees_with_the_definition_of_the_deposit(
    gap_ticks, interval_s, now_tick
) -> None:
    now_s = now_tick * TICK_S
    generated_s = [g for g in times_from(gap_ticks) if g <= now_s]
    model = ReaderModel(interval_s)
    for g in generated_s:
        model.generated(g)

    expected = num_deposited(generated_s, due_times_s(generated_s, interval_s), now_s)

    assert model.num_deposited(now_s) == expected


def test_the_deposit_at_its_boundaries() -> None:
    # Tokens at 0, 0, 0 with S = 1 are due at 0, 1, 2.
    generated_s, due_s = [0.0, 0.0, 0.0], [0.0, 1.0, 2.0]

    assert [num_deposited(generated_s, due_s, t) for t in (-0.5, 0.0, 0.5, 1.0, 2.0)] == [
        0, 2, 2, 1, 0,
    ]  # fmt: skip


def test_a_report_corrects_the_reader_model() -> None:
    model = ReaderModel(1.0)
    for _ in range(5):
        model.generated(0.0)  # due at 0, 1, 2, 3, 4
    assert model.num_deposited(2.0) == 2

    model.delivered(1, now_s=2.0)  # the reader is slower: one token out, four in hand

    assert model.num_deposited(2.0) == 4
    assert model.num_deposited(3.0) == 3


def test_a_late_report_never_takes_tokens_back() -> None:
    model = ReaderModel(1.0)
    for _ in range(3):
        model.generated(0.0)
    model.delivered(2, now_s=1.0)

    model.delivered(1, now_s=1.0)

    assert model.num_deposited(1.0) == 1


@pytest.mark.parametrize(
    ("level", "interval_s"),
    [
        pytest.param(ServiceLevel(), 0.0, id="an-ordinary-client-is-never-slowed"),
        pytest.param(ServiceLevel(slo_ttft_s=1.0), 0.0, id="a-first-token-bound-sets-no-pace"),
        pytest.param(ServiceLevel(slo_tpot_s=0.2), 0.2, id="tpot-stands-in-for-tbt"),
        pytest.param(ServiceLevel(slo_tpot_s=0.2, slo_tbt_s=0.5), 0.5, id="tbt-before-tpot"),
        pytest.param(
            ServiceLevel(slo_tbt_s=0.5, consumption_rate_tps=4.0), 0.25, id="rate-before-tbt"
        ),
    ],
)
def test_the_release_interval_comes_from_rate_then_tbt_then_tpot(level, interval_s) -> None:
    assert release_interval_s(level) == interval_s


def test_a_token_is_late_only_beyond_the_tolerance() -> None:
    # Due at 1.0 + 0.5; 5 ms later is still in time.
    assert not violates_delivered_tbt(1.504, 1.0, 0.5)
    assert violates_delivered_tbt(1.506, 1.0, 0.5)
    assert not violates_delivered_tbt(1.506, 1.0, 0.5, tolerance_s=0.01)


def test_tpot_needs_two_tokens() -> None:
    assert tpot_s([]) is None
    assert tpot_s([3.0]) is None
    assert tpot_s([3.0, 3.5, 5.0]) == 1.0


def as_due(generated_s: list[float], is_read: list[bool]) -> list[float]:
    """Return every due time by the definition: what nobody reads waits for what is before it."""
    due_s: list[float] = []
    turn_s = float("-inf")
    for g, reads in zip(generated_s, is_read, strict=True):
        turn_s = max(g, turn_s + 1.0) if reads else turn_s
        due_s.append(turn_s if reads else max(g, turn_s))
    return due_s


LAG = 2  # tokens, until the scheduler hears of a turn
runs = st.lists(
    st.lists(st.integers(min_value=0, max_value=12), min_size=LAG + 1, max_size=9),
    min_size=1,
    max_size=4,
)


@given(runs, st.booleans())
def test_the_reader_model_knows_what_is_read_once_it_is_told(gap_runs, reads_first) -> None:
    """Runs of thoughts and text in turn."""
    generated_s = times_from([gap for run in gap_runs for gap in run])
    is_read = [reads_first ^ bool(k % 2) for k, run in enumerate(gap_runs) for _ in run]
    model = ReaderModel(1.0, reads=reads_first)
    for index, now_s in enumerate(generated_s):
        model.generated(now_s)
        turn = max(0, index - LAG)
        model.turned(turn, reads=is_read[turn], now_s=now_s)

    due_s, now_s = as_due(generated_s, is_read), generated_s[-1]
    turns_s = [due for due, reads in zip(due_s, is_read, strict=True) if reads]
    assert model.turn_s == (turns_s[-1] if turns_s else None)
    assert model.num_deposited(now_s) == num_deposited(generated_s, due_s, now_s)


def test_what_a_model_thinks_is_never_in_hand() -> None:
    model = ReaderModel(1.0, reads=False)
    for now_s in (0.0, 0.1, 0.2, 0.3, 0.4):  # the last two are text
        model.generated(now_s)
    assert (model.num_deposited(0.4), model.turn_s) == (0, None)

    model.turned(3, reads=True, now_s=0.5)  # due at 0.3 and 1.3

    assert (model.num_deposited(0.5), model.turn_s) == (1, 1.3)
    model.generated(0.6)
    assert model.turn_s == 2.3


def test_a_call_after_text_takes_no_turn() -> None:
    model = ReaderModel(1.0)
    for _ in range(4):
        model.generated(0.0)  # due at 0, 1, 2 and 3

    model.turned(2, reads=False, now_s=0.5)
    model.generated(0.6)

    assert model.turn_s == model.last_due_s == 1.0  # all that follows waits for the second
    assert [model.num_deposited(t) for t in (0.6, 1.0)] == [4, 0]


def test_a_new_pace_counts_from_the_turn_of_the_newest_token_that_was_read() -> None:
    reader = ReaderModel(1.0)
    for _ in range(5):
        reader.generated(10.0)  # due at 10, 11, 12, 13, 14

    reader.repace(0.25, 11.5)

    # Two are read; the others at 11.5 (0.25 s after 11 is past), 11.75 and 12.
    assert [reader.num_deposited(at_s) for at_s in (11.4, 11.6, 11.8, 12.1)] == [3, 2, 1, 0]
    reader.repace(4.0, 11.6)
    # The third was read at 11.5: the fourth is at 15.5, the fifth at 19.5, the next at 23.5.
    assert reader.last_due_s == 19.5
    reader.generated(12.0)
    assert reader.last_due_s == 23.5


def test_thoughts_that_wait_take_no_turn_of_a_new_pace() -> None:
    reader = ReaderModel(1.0)
    reader.generated(10.0)
    reader.turned(1, reads=False, now_s=10.0)
    reader.generated(10.0)

    reader.repace(5.0, 10.0)

    assert reader.last_due_s == 10.0
    reader.turned(2, reads=True, now_s=10.0)
    reader.generated(10.0)
    assert reader.last_due_s == 15.0
