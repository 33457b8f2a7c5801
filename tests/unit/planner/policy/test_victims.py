"""The sets of victims that are tried."""

import numpy as np
import pytest

from lab.planning.snapshots import make_request, make_snapshot
from services.placement.types import Plan, RequestPhase, Snapshot
from services.planner.policy.policies import make_plan
from services.planner.policy.victims import growing_sets
from services.planner.solver.budget import DeadlineBudget, NodeBudget
from tests.planning import GOOD, optimiser, paused, plan_of

pytestmark = pytest.mark.timeout(3_600)  # the first run compiles the kernels


def names(sets: object) -> list[str]:
    return ["".join(r.request_id for r in victims) for victims in sets]


def test_growing_sets_start_where_a_rest_may_succeed_and_grow_ever_faster() -> None:
    ranked = [make_request(name) for name in "abcdefgh"]

    sets = growing_sets(ranked, num_running=9, is_hopeless=lambda victims: len(victims) < 2)

    assert names(sets) == ["ab", "abc", "abcde", "abcdefgh"]


def test_never_is_everybody_a_victim() -> None:
    ranked = [make_request(name) for name in "abc"]

    sets = growing_sets(ranked, num_running=3, is_hopeless=lambda victims: False)

    assert names(sets)[-1] == "ab"


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
        num_free_blocks=int(least * random.uniform(0.7, 3.0)) + 16,
        min_window=1,
        max_window=4,
        alpha=0.0,
    )


def infeasible(num_requests: int) -> Snapshot:
    """Return a batch with room enough in which no set of victims keeps the SLO of the others."""
    resumed = [{"resumed_age_s": 0.0}] * 2  # these two may not be paused again
    each = [*resumed, *[{}] * (num_requests - len(resumed))]
    # One alone takes 10.22 ms, two take 10.45.
    requests = [
        make_request(f"r{i}", 4_000, slo_tbt_s=10.3e-3, **more) for i, more in enumerate(each)
    ]
    return make_snapshot(*requests, num_free_blocks=num_requests * 2_500, alpha=0.0, max_window=4)


def test_without_time_one_set_is_tried_and_the_plan_is_undecided() -> None:
    snapshot = infeasible(6)
    plan = plan_of(snapshot)
    assert (plan.status.value, paused(plan)) == ("infeasible", [])

    late = make_plan(snapshot, DeadlineBudget(lambda: 1.0, 0.0), optimiser())
    assert late.quality is not None
    assert late.status not in GOOD
    assert paused(late) == []
    assert late.quality.num_nodes == 0


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
