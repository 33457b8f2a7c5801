"""What readers wait for, and which tokens come too early to count: tables computed by hand."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.pacing.reading import Reading, effective_of, effective_tokens, reading_of

INTERVAL_S = 0.1


@pytest.mark.parametrize(
    ("taken_s", "num_late", "waited_s"),
    [
        pytest.param([5.0], 0, 0.0, id="one-token"),
        pytest.param([0.0, 0.1, 0.2], 0, 0.0, id="on-time"),
        pytest.param([0.0, 0.01, 0.02], 0, 0.0, id="early-is-read-at-the-pace"),
        # Within 5 ms it is in time, and the turns stay 0.1 and 0.2.
        pytest.param([0.0, 0.104, 0.204], 0, 0.0, id="within-the-tolerance"),
        pytest.param([0.0, 0.106, 0.206], 1, 0.006, id="beyond-the-tolerance"),
        # 0.5 comes 0.3 after its turn of 0.2; the turns after it are 0.6 and 0.7.
        pytest.param([0.0, 0.1, 0.5, 0.6, 0.7], 1, 0.3, id="a-gap-is-one-stall"),
        # 0.4 is 0.3 after its turn, 0.8 is 0.3 after 0.5.
        pytest.param([0.0, 0.4, 0.8], 2, 0.6, id="two-stalls"),
        # The deposit covers it: four tokens came at once, the fifth is due at 0.4.
        pytest.param([0.0, 0.0, 0.0, 0.0, 0.4], 0, 0.0, id="a-deposit-covers-a-gap"),
        # All wait for the first of them: the time is waited once.
        pytest.param([0.0, 1.1, 1.1, 1.1], 1, 1.0, id="a-stop-of-the-reader-is-one-stall"),
    ],
)
def test_waiting_by_hand(taken_s: list[float], num_late: int, waited_s: float) -> None:
    reading = reading_of(taken_s, INTERVAL_S)

    assert (reading.num_gaps, reading.num_late) == (len(taken_s) - 1, num_late)
    assert reading.waited_s == pytest.approx(waited_s)
    assert reading.reading_s == pytest.approx((len(taken_s) - 1) * INTERVAL_S)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30))
def test_waiting_never_exceeds_what_the_answer_took_and_fills_it_with_reading(
    gaps_s: list[float],
) -> None:
    taken_s = [sum(gaps_s[:number]) for number in range(len(gaps_s) + 1)]

    reading = reading_of(taken_s, INTERVAL_S, tolerance_s=0.0)

    assert 0.0 <= reading.waited_s <= taken_s[-1] + 1e-9
    assert reading.reading_s + reading.waited_s >= taken_s[-1] - 1e-9


@pytest.mark.parametrize(
    ("num_in_hand", "expected"),
    [
        pytest.param({}, 0.0, id="no-token"),
        pytest.param({0: 20}, 20.0, id="at-the-pace"),
        # Of 20, up to 2 in hand count in full, 3 half, 4 nothing.
        pytest.param({0: 1, 1: 1, 2: 1, 3: 1, 4: 16}, 3.5, id="too-many-ahead"),
        pytest.param({0: 1, 19: 19}, 1.0, id="far-ahead"),
    ],
)
def test_tokens_count_by_what_their_reader_has_in_hand(num_in_hand, expected) -> None:
    assert effective_tokens(num_in_hand) == pytest.approx(expected)


def test_effective_tokens_are_those_of_the_formula_token_by_token() -> None:
    rng = random.Random(1)
    in_hand = [rng.randrange(40) for _ in range(100)]

    def weight(number: int) -> float:
        return min(1.0, max(0.0, (0.2 - number / 100) / 0.1))

    counts = {number: in_hand.count(number) for number in set(in_hand)}
    assert effective_tokens(counts) == pytest.approx(sum(map(weight, in_hand)))


def test_tokens_at_the_readers_pace_count_in_full() -> None:
    assert effective_of([float(second) for second in range(20)], 1.0) == 20.0


def test_of_all_tokens_at_once_those_up_to_a_tenth_ahead_count_and_fewer_up_to_a_fifth() -> None:
    # The first of 20 is read at once; 0, 1, 2, 3 and 4 are in hand when the next ones come.
    assert effective_of([0.0] * 20, 1.0) == pytest.approx(1 + 1 + 1 + 1 + 0.5)
    assert effective_of([0.0] * 20, 0.0) == 20.0


@pytest.mark.parametrize(
    ("now_s", "num_in_hand"), [(0.0, 3), (0.5, 3), (1.0, 2), (2.999, 1), (3.0, 0), (9.0, 0)]
)
def test_what_came_before_its_turn_is_in_hand_until_then(now_s: float, num_in_hand: int) -> None:
    assert reading_of([0.0] * 4, 1.0).num_in_hand(now_s) == num_in_hand  # turns at 0, 1, 2 and 3


def test_without_a_token_or_a_pace_nothing_is_in_hand() -> None:
    assert Reading(1.0).num_in_hand(0.0) == 0
    assert reading_of([5.0, 5.0], 0.0).num_in_hand(5.0) == 0
