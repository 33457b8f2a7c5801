"""The sets that are tried, and that SMALLEST_SET pauses no more than it must."""

import dataclasses
from itertools import combinations

import numpy as np
import pytest

from lab.planning.snapshots import make_request, make_snapshot
from services.placement.types import Plan, RequestPhase, Snapshot, VictimRule
from services.planner.policy.policies import make_plan
from services.planner.policy.victims import cost, growing_sets, smallest_sets
from services.planner.solver.budget import DeadlineBudget, NodeBudget
from tests.planning import GOOD, optimiser, paused, plan_of

pytestmark = pytest.mark.timeout(3_600)  # the first run compiles the kernels

NOBODY = frozenset[int]()


def names(sets: object) -> list[str]:
    return ["".join(r.request_id for r in victims) for victims in sets]


def test_growing_sets_start_where_a_rest_may_succeed_and_grow_ever_faster() -> None:
    ranked = [make_request(name) for name in "abcdefgh"]

    sets = growing_sets(ranked, num_running=9, is_hopeless=lambda victims: len(victims) < 2)

    assert names(sets) == ["ab", "abc", "abcde", "abcdefgh"]


def test_never_is_everybody_a_victim() -> None:
    ranked = [make_request(name) for name in "abc"]
    few = {"num_running": 3, "is_hopeless": lambda victims: False}

    assert names(growing_sets(ranked, **few))[-1] == "ab"
    assert all(len(s) < 3 for s in smallest_sets(ranked, NodeBudget(99), **few))


def test_smallest_sets_come_in_the_order_of_their_kv() -> None:
    sizes = {"a": 100, "b": 250, "c": 300}
    candidates = [make_request(name, size) for name, size in sizes.items()]

    found = smallest_sets(
        candidates, NodeBudget(99), num_running=4, is_hopeless=lambda victims: False
    )

    assert names(found) == ["a", "b", "c", "ab", "ac", "bc", "abc"]


def test_the_more_important_are_spared_before_the_smaller() -> None:
    # Lower is more important: 900 tokens of priority 5 are paused before 100 of priority 0.
    small = make_request("s", 100, priority=0)
    large = make_request("l", 900, priority=5)

    assert cost([small, large], frozenset({1})) < cost([small, large], frozenset({0}))
    found = smallest_sets(
        [small, large], NodeBudget(99), num_running=3, is_hopeless=lambda victims: False
    )
    assert names(found) == ["l", "s", "sl"]


def test_parts_of_a_set_that_fails_are_not_looked_at_and_the_budget_ends_the_search() -> None:
    candidates = [make_request(name, 100 + i) for i, name in enumerate("abc")]
    seen: list[str] = []

    def is_hopeless(victims) -> bool:
        seen.append("".join(r.request_id for r in victims))
        return True

    budget = NodeBudget(5)
    assert list(smallest_sets(candidates, budget, num_running=4, is_hopeless=is_hopeless)) == []
    assert seen == ["a", "b", "c", "ab", "ac"]
    assert budget.num_nodes == 5


def crowd(random: np.random.Generator, num_requests: int) -> Snapshot:
    """Return a batch that the pool, or the SLO, cannot hold together."""
    requests = [
        make_request(
            f"r{i}",
            int(random.integers(2, 24)) * 800,
            slo_tbt_s=[None, 0.03, 0.06][random.integers(3)],
            priority=int(random.integers(0, 2)),
        )
        for i in range(num_requests)
    ]
    least = sum(request.num_tokens // 16 for request in requests)
    return make_snapshot(
        *requests,
        victim_rule=VictimRule.SMALLEST_SET,
        num_free_blocks=int(least * random.uniform(0.7, 3.0)) + 16,
        min_window=1,
        max_window=4,
        alpha=0.0,
    )


def suffices(snapshot: Snapshot, chosen: frozenset[int]) -> bool:
    """Say whether the rest keeps its constraints when nobody else may be paused.

    Where the pool could hold all, a pause is for somebody's SLO, so the rest has one to keep.
    """
    readers = [r for i, r in enumerate(snapshot.requests) if i not in chosen and r.slo_s]
    if not readers and not needs_room(snapshot):
        return False
    requests = tuple(
        dataclasses.replace(r, phase=RequestPhase.PAUSED, paused_age_s=0.0) if i in chosen else r
        for i, r in enumerate(snapshot.requests)
    )
    alone = dataclasses.replace(snapshot.parameters, pause=False)
    rest = dataclasses.replace(snapshot, requests=requests, parameters=alone)
    plan = plan_of(rest, nodes=10**5)
    return plan.status in GOOD and paused(plan) == [requests[i].request_id for i in sorted(chosen)]


def needs_room(snapshot: Snapshot) -> bool:
    free = tuple(dataclasses.replace(r, slo_tbt_s=None) for r in snapshot.requests)
    return paused(plan_of(dataclasses.replace(snapshot, requests=free))) != []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_requests", [2, 3, 4, 5])
def test_a_smallest_set_that_suffices_is_paused(num_requests: int, seed: int) -> None:
    random = np.random.default_rng((num_requests, seed))
    num_paused = 0
    for _ in range(3):
        snapshot = crowd(random, num_requests)
        plan = plan_of(snapshot, nodes=10**5)
        if plan.status not in GOOD or not paused(plan):
            continue
        chosen = frozenset(i for i, p in enumerate(plan.placements) if p.paused)
        requests = snapshot.requests
        sets = [
            frozenset(one)
            for size in range(num_requests)
            for one in combinations(range(num_requests), size)
        ]
        enough = [cost(requests, one) for one in sets if suffices(snapshot, one)]
        assert cost(requests, chosen) == min(enough)
        num_paused += 1

    assert num_paused >= 1


def test_beyond_the_exact_size_the_fewest_of_the_largest_are_paused() -> None:
    # Ten alike: fully offloaded each needs 2 * 500 blocks or so; seven fit.
    requests = [make_request(f"r{i}", 8_000) for i in range(10)]
    least = 500 + 8 + 8  # one buffer, open blocks, and sealing
    plan = plan_of(
        make_snapshot(
            *requests, num_free_blocks=7 * least + 100, victim_rule=VictimRule.SMALLEST_SET
        )
    )

    assert plan.status in GOOD
    assert len(paused(plan)) == 3


def infeasible(num_requests: int) -> Snapshot:
    """Return a batch with room enough in which no set of victims keeps the SLO of the others."""
    resumed = [{"resumed_age_s": 0.0}] * 2  # these two may not be paused again
    each = [*resumed, *[{}] * (num_requests - len(resumed))]
    # One alone takes 10.22 ms, two take 10.45.
    requests = [
        make_request(f"r{i}", 4_000, slo_tbt_s=10.3e-3, **more) for i, more in enumerate(each)
    ]
    return make_snapshot(*requests, num_free_blocks=num_requests * 2_500, alpha=0.0, max_window=4)


@pytest.mark.parametrize("rule", [VictimRule.KV_AND_DEPOSIT, VictimRule.SMALLEST_SET])
def test_without_time_one_set_is_tried_and_the_plan_is_undecided(rule: VictimRule) -> None:
    snapshot = infeasible(6)
    plan = plan_of(dataclasses.replace(snapshot, parameters=_with_rule(snapshot, rule)))
    assert (plan.status.value, paused(plan)) == ("infeasible", [])

    late = make_plan(snapshot, DeadlineBudget(lambda: 1.0, 0.0), optimiser())
    assert late.quality is not None
    assert late.status not in GOOD
    assert paused(late) == []
    assert late.quality.num_nodes == 0


def _with_rule(snapshot: Snapshot, rule: VictimRule):
    return dataclasses.replace(snapshot.parameters, victim_rule=rule)


def test_a_deadline_in_the_middle_of_the_victims_is_replayed_by_nodes() -> None:
    snapshot = crowd(np.random.default_rng(44), 6)
    for ticks in (1, 3, 10, 30, 100, 300):
        clock = iter(range(10**6))
        live: Plan = make_plan(
            snapshot, DeadlineBudget(lambda c=clock: float(next(c)), float(ticks)), optimiser()
        )
        assert live.quality is not None
        again = make_plan(snapshot, NodeBudget(live.quality.num_nodes), optimiser())

        assert again == live


def test_nobody_is_paused_for_an_slo_where_no_reader_gains() -> None:
    # Two readers want 20 ms; a third request is a prompt whose chunks take 0.4 s each. To pause
    # both readers would leave no late token, and serve nobody.
    prompt = make_request(
        "prompt",
        32_000,
        phase=RequestPhase.PREFILL,
        num_output_tokens=0,
        num_prompt_tokens=32_000,
        num_computed_tokens=1_600,
        num_host_blocks=(100,) * 8,
    )
    readers = [make_request(name, slo_tbt_s=0.02) for name in "ab"]

    plan = plan_of(make_snapshot(*readers, prompt, num_free_blocks=50_000, alpha=0.0))

    assert paused(plan) == []
    assert plan.status.value == "infeasible"
