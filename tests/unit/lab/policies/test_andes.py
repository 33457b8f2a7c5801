"""Andes: the knapsack, and when anybody is preempted at all."""

import math

from lab.policies.andes import AndesRules, decide
from services.placement.run.resume import ResumeWay
from tests.unit.placement.run.snapshots import ask, make_snapshot, runs

READER = {"rate_tps": 20.0}


def test_while_nobody_waits_everybody_runs_and_nobody_asks_again() -> None:
    decision = decide(make_snapshot(runs("a", 700, **READER), runs("b", 700, **READER)))

    assert decision.run == ("a", "b")
    assert (decision.park, decision.valid_for_s) == (frozenset(), math.inf)


def test_who_has_most_in_hand_makes_room_for_a_newcomer() -> None:
    rich, poor = runs("rich", 700, slack_s=9.0, **READER), runs("poor", 700, **READER)

    decision = decide(make_snapshot(rich, poor, ask("new", 600, **READER)))

    assert decision.park == {"rich"}
    assert decision.run == ("poor", "new")
    assert decision.allowed_ways == {ResumeWay.RECOMPUTE}


def test_a_newcomer_gains_more_per_token_the_shorter_it_is() -> None:
    old = runs("old", 900, num_parks=3, **READER)
    shorter, longer = ask("shorter", 300, **READER), ask("longer", 600, **READER)

    assert decide(make_snapshot(old, longer, shorter)).run == ("old", "shorter")


def test_nobody_is_preempted_more_often_than_once_on_average() -> None:
    rich = runs("rich", 700, slack_s=9.0, num_parks=3, **READER)
    poor, new = runs("poor", 700, **READER), ask("new", 600, **READER)

    assert not decide(make_snapshot(rich, poor, new)).park
    more = AndesRules(parks_per_request=2.0)
    assert decide(make_snapshot(rich, poor, new), more).park == {"rich"}


def test_one_that_is_larger_than_the_pool_is_let_in_alone() -> None:
    assert decide(make_snapshot(ask("large", 5_000, **READER))).run == ("large",)
