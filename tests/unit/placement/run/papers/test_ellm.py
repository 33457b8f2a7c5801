"""eLLM: how many run, and how much of their KV is computed anew in every step."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.policies import fcfs
from services.placement.run.papers import ellm
from services.placement.run.papers.ellm import EllmRules, best_batch
from tests.fuzz import examples
from tests.unit.placement.run.snapshots import COSTS, ask, make_engine, make_snapshot, runs

FREE = replace(COSTS, chunk_token_s=1e-12)  # what is computed anew costs nothing
DEAR = replace(COSTS, chunk_token_s=0.01)
WIDE = make_engine(max_num_batched_tokens=4_000)


@settings(max_examples=examples(100))
@given(
    room=st.integers(1, 60),
    base=st.integers(1, 20),
    token=st.integers(0, 5),
    slack=st.integers(0, 40),
    slo=st.integers(5, 200),
)
def test_the_best_batch_is_that_of_a_search_over_all_batches_and_ratios(
    room: int, base: int, token: int, slack: int, slo: int
) -> None:
    # Ten requests of ten units of KV each; units beyond `slack` cost `token` each.
    def step_s(size: int, frac: float) -> float:
        return base + size + token * max(0.0, 10 * size * frac - slack)

    def fits(size: int, frac: float) -> bool:
        return 10 * size * (1.0 - frac) <= room + 1e-9

    def least_frac(size: int) -> float | None:
        return max(0.0, 1.0 - room / (10 * size))

    found = best_batch(
        range(1, 11), least_frac=least_frac, step_s=step_s, slo_s=lambda size: float(slo)
    )

    tried = [
        step_s(size, frac) / size
        for size in range(1, 11)
        for frac in [k / 60 for k in range(61)]
        if fits(size, frac) and step_s(size, frac) <= slo - 1e-9  # not by rounding alone
    ]
    if found is None:
        assert not tried
    else:
        best = step_s(found.num_requests, found.uncached_frac) / found.num_requests
        assert best <= min(tried, default=math.inf) + 1e-9


def test_a_batch_that_fits_keeps_all_of_its_kv() -> None:
    snapshot = make_snapshot(runs("r", 500), ask("a", 500))

    decision = ellm.decide(snapshot)

    assert decision.run == ("r", "a")
    assert not decision.uncached_blocks


def test_who_fits_with_nothing_uncached_is_the_same_for_every_baseline() -> None:
    # A pool of 1,600 tokens; a token computed anew takes longer than one more request brings.
    requests = [runs("r", 700), runs("s", 700), ask("a", 500), ask("b", 10)]
    snapshot = make_snapshot(*requests, costs=DEAR)

    for policy in (ellm.decide, fcfs.recompute, fcfs.swap):
        assert policy(snapshot).run == ("r", "s")


def test_where_computing_anew_is_free_as_much_is_uncached_as_makes_room_for_the_next() -> None:
    snapshot = make_snapshot(runs("r", 700), runs("s", 700), ask("a", 500), costs=FREE, engine=WIDE)

    decision = ellm.decide(snapshot)

    # 45 + 45 + 32 rows of 4 groups are 88 blocks more than 400; a position saves 3 of them.
    assert decision.run == ("r", "s", "a")
    assert sum(decision.uncached_blocks.values()) == 30
    assert decision.uncached_blocks.keys() == {"r", "s"}  # a's prompt is not computed yet
    used = 4 * (45 + 45 + 32) - 3 * sum(decision.uncached_blocks.values())
    assert used <= make_engine().num_blocks


def test_no_more_is_computed_anew_than_a_step_may_compute() -> None:
    batch = [runs("r", 700), runs("s", 700), ask("a", 500)]
    # A third of the 119 full blocks of all three are 634.7 tokens; each decodes one more.
    for limit, run in ((638, ("r", "s", "a")), (637, ("r", "s"))):
        engine = make_engine(max_num_batched_tokens=limit)
        assert ellm.decide(make_snapshot(*batch, costs=FREE, engine=engine)).run == run


def test_a_given_ratio_is_taken_of_everybody_in_whole_blocks() -> None:
    rules = EllmRules(uncached_frac=0.25)
    decision = ellm.decide(make_snapshot(runs("r", 500), runs("s", 100)), rules)

    # 507 and 107 tokens before the newest: 31 and 6 blocks.
    assert decision.uncached_blocks == {"r": 8, "s": 2}


@pytest.mark.parametrize("rules", [EllmRules(), EllmRules(uncached_frac=0.0)])
def test_nobody_comes_whose_coming_breaks_the_slo_but_who_runs_stays(rules: EllmRules) -> None:
    # A step of two takes 22 ms.
    def decided(rate_tps: float) -> tuple[str, ...]:
        running = runs("r", 100, rate_tps=rate_tps)
        return ellm.decide(make_snapshot(running, ask("a", 100)), rules).run

    assert decided(45.0) == ("r", "a")
    assert decided(46.0) == ("r",)
    assert decided(1_000.0) == ("r",)


def test_when_the_batch_outgrows_the_pool_the_newest_gives_way() -> None:
    batch = [runs("old", 800, age_s=30.0), runs("new", 800, age_s=5.0)]

    for rules in (EllmRules(), EllmRules(uncached_frac=0.0)):
        decision = ellm.decide(make_snapshot(*batch, costs=DEAR), rules)
        assert decision.park == {"new"}
    assert not ellm.decide(make_snapshot(*batch, costs=FREE)).park


@pytest.mark.parametrize("costs", [None, replace(COSTS, chunk_token_s=0.0)])
def test_all_is_kept_while_it_is_not_known_what_computing_anew_costs(costs) -> None:
    decision = ellm.decide(make_snapshot(runs("r", 900), runs("s", 700), costs=costs))

    assert decision.run == ("r",)
    assert not decision.uncached_blocks
