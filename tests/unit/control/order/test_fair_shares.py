"""What ids have attained of the pool, and in which order that puts them."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.control.order import fair_shares
from services.control.order.fair_shares import FORGOTTEN_AFTER, FairShares

HALF_LIFE_S = 10.0
AHEAD_S = 1.0
MEAN_LIFE_S = HALF_LIFE_S / math.log(2.0)


def held_for(seconds: float, **tokens: float) -> FairShares:
    """Return the book once ids have held so many tokens from 0 on."""
    shares = FairShares(HALF_LIFE_S)
    shares.hold(tokens, 0.0)
    shares.advance(seconds)
    return shares


def test_what_is_held_is_attained_and_counts_half_after_a_half_life() -> None:
    shares = held_for(0.001, a=1_000.0)
    assert shares.standing("a") == pytest.approx(1.0 + 1_000.0 * AHEAD_S, rel=1e-4)

    shares.hold({"a": 0.0}, 0.001)
    shares.advance(0.001 + HALF_LIFE_S)
    assert shares.standing("a") == pytest.approx(0.5, rel=1e-4)


def test_an_id_that_holds_the_same_for_ever_attains_that_for_a_share() -> None:
    shares = held_for(30 * HALF_LIFE_S, a=7.0)

    shares.hold({"a": 0.0}, 30 * HALF_LIFE_S)
    assert shares.standing("a") == pytest.approx(7.0 * MEAN_LIFE_S)


@given(cuts=st.lists(st.floats(0.0, 100.0), max_size=20))
def test_what_is_attained_does_not_depend_on_how_often_it_is_counted(cuts: list[float]) -> None:
    shares = FairShares(HALF_LIFE_S)
    shares.hold({"a": 3.0}, 0.0)
    told = 0.0
    for instant in sorted([*cuts, 100.0]):
        shares.advance(instant)
        told += shares.take().get("a", 0.0)

    assert shares.standing("a") == pytest.approx(held_for(100.0, a=3.0).standing("a"))
    assert told == pytest.approx(300.0)


def test_what_an_id_holds_counts_for_its_place_before_it_has_attained_anything() -> None:
    shares = held_for(0.0, a=5.0, b=4.0)

    assert shares.standing("b") < shares.standing("a")


def test_an_id_that_was_away_gains_no_more_than_the_half_life_leaves() -> None:
    """Away for ever, it is where one is that never came: no credit is saved up."""
    shares = held_for(50.0, a=10.0, b=10.0)
    shares.hold({"b": 10.0}, 50.0)
    shares.advance(50.0 + 2 * HALF_LIFE_S)
    late_s = 50.0 + 2 * HALF_LIFE_S
    before = held_for(50.0, a=10.0)
    before.hold({"a": 0.0}, 50.0)
    shares.hold({"a": 0.0, "b": 0.0, "new": 0.0}, late_s)

    assert shares.standing("a") == pytest.approx(before.standing("a") / 4)
    assert 0.0 == shares.standing("new") < shares.standing("a") < shares.standing("b")
    assert shares.standing("b") <= 10.0 * MEAN_LIFE_S


def test_an_id_that_is_passed_over_for_a_half_life_stands_below_all_others() -> None:
    shares = held_for(100.0, a=10.0, b=1.0)
    for now_s in (100.0, 100.0 + HALF_LIFE_S):
        shares.hold({"a": 0.0, "b": 1.0, f"new at {now_s}": 0.0}, now_s)
    assert shares.standing("a") > shares.standing("b") > 0.0

    late_s = 100.1 + HALF_LIFE_S
    shares.hold({"a": 0.0, "b": 1.0, "new": 0.0}, late_s)
    assert shares.standing("a") < 0.0 == shares.standing("new")
    shares.hold({"a": 1.0, "b": 1.0}, late_s)
    assert shares.standing("a") > shares.standing("b")


def test_while_an_id_has_no_requests_it_is_not_passed_over() -> None:
    shares = held_for(1.0, a=10.0)
    shares.hold({}, 1.0)
    shares.hold({"a": 0.0}, 1.0 + 3 * HALF_LIFE_S)

    assert shares.standing("a") > 0.0


def test_what_is_suspended_attains_nothing_until_it_is_told_again() -> None:
    shares = held_for(1.0, a=10.0)
    shares.suspend(2.0)
    shares.advance(1_000.0)
    assert shares.take() == {"a": pytest.approx(20.0)}

    shares.hold({"a": 10.0}, 1_000.0)
    shares.advance(1_001.0)
    assert shares.take() == {"a": pytest.approx(10.0)}


def test_jains_index_is_of_ids_with_requests() -> None:
    assert FairShares(HALF_LIFE_S).jain_index == 1.0
    assert held_for(1.0, a=2.0, b=2.0).jain_index == pytest.approx(1.0)
    # (3 + 1)^2 / (2 x (9 + 1))
    assert held_for(1.0, a=3.0, b=1.0).jain_index == pytest.approx(0.8)
    assert held_for(1.0, a=3.0, b=0.0, c=0.0).jain_index == pytest.approx(1 / 3)
    gone = held_for(1.0, a=3.0, b=1.0)
    gone.hold({"a": 1.0}, 1.0)
    assert gone.jain_index == 1.0


def test_ids_without_requests_are_forgotten_in_time_and_beyond_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fair_shares, "MAX_IDLE_IDS", 3)
    shares = FairShares(HALF_LIFE_S)
    for number in range(6):
        shares.hold({f"n{number}": 1.0}, float(number))
    assert list(shares._idle) == ["n2", "n3", "n4"]

    shares.hold({"n5": 1.0}, 4.0 + FORGOTTEN_AFTER * HALF_LIFE_S)  # n3 went idle at 4
    assert list(shares._idle) == ["n4"]


@pytest.mark.parametrize("seed", range(5))
def test_served_by_standing_ids_hold_the_same_whatever_they_ask_for(seed: int) -> None:
    """A pool of 100 tokens; each request holds some for a while; all ids always want more."""
    rng = random.Random(seed)
    shares, names = FairShares(HALF_LIFE_S), ["a", "b", "c"]
    running: list[tuple[float, str, float]] = []  # until when, whose, tokens
    total = dict.fromkeys(names, 0.0)
    instants = [0.1 * n for n in range(3_000)]
    for before_s, now_s in pairwise(instants):
        running = [one for one in running if one[0] > now_s]
        while True:
            held = {name: sum(t for _, own, t in running if own == name) for name in names}
            shares.hold(held, now_s)
            least = min(names, key=shares.standing)
            size = {"a": 5.0, "b": 20.0, "c": 33.0}[least]
            if sum(held.values()) + size > 100.0:
                break
            running.append((now_s + rng.uniform(1.0, 4.0), least, size))
        for name in names:
            total[name] += held[name] * (now_s - before_s)

    assert min(total.values()) >= 0.9 * max(total.values())
