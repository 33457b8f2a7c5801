"""What a plan is said to do is what the shared formulas say it does."""

import dataclasses

import pytest

from lab.planning.snapshots import make_prefix, make_request, make_snapshot
from lab.policies.dynamic_heuristic import dynamic_heuristic
from services.placement.judging.rating import rated
from services.placement.step_time.batch import (
    capacity_blocks,
    demand_of,
    placed_by,
    pool_need,
    predicted_step_s,
)
from services.placement.types import Plan, PlanStatus, Quality, Replan, RequestPhase, Snapshot
from tests.plans import running
from tests.policies import RULES


def rated_plan(snapshot: Snapshot, policy: str) -> tuple[Plan, Quality]:
    plan = rated(RULES[policy].rule(snapshot), snapshot, RULES[policy].replan)
    assert plan.quality is not None
    return plan, plan.quality


def needed_blocks(snapshot: Snapshot, plan: Plan, growth: int) -> int:
    return sum(
        pool_need(demand_of(holder, snapshot.engine, growth=growth), pattern)
        for holder, pattern in placed_by(plan, snapshot, running(snapshot, plan))
    )


@pytest.mark.parametrize("policy", RULES)
def test_every_policy_predicts_its_step_by_the_latency_model(policy: str) -> None:
    snapshot = make_snapshot(
        make_request("a", 8_000, prefix_ids=("t",)),
        make_request("b", 3_001),
        prefixes=(make_prefix("t", 320),),
        num_free_blocks=5_000,
        max_window=24,
    )

    plan, quality = rated_plan(snapshot, policy)

    placed = placed_by(plan, snapshot, running(snapshot, plan))
    assert quality.first_latency_s == predicted_step_s(snapshot, placed)
    assert quality.latency_s == predicted_step_s(snapshot, placed, growth=quality.window - 1)
    assert 0.0 < quality.lower_bound_s <= quality.objective_s
    assert quality.window == 1 or RULES[policy].replan is not Replan.EVERY_STEP


@pytest.mark.parametrize("policy", [p for p in RULES if p != "all_resident"])
@pytest.mark.parametrize("spare", [0, 8, 40, 400])
def test_a_plan_expires_before_the_pool_is_exceeded(policy: str, spare: int) -> None:
    snapshot = make_snapshot(
        make_request("a", 8_003, prefix_ids=("t",)),
        make_request("b", 3_001, prefix_ids=("t",)),
        prefixes=(make_prefix("t", 1_600),),
        num_free_blocks=4_000 + spare,
    )

    plan, quality = rated_plan(snapshot, policy)

    for growth in range(1, quality.expires_after + 1):
        assert needed_blocks(snapshot, plan, growth) <= capacity_blocks(snapshot)


def test_a_batch_that_fills_its_last_block_expires_then() -> None:
    # 1603 tokens are 100 full blocks and an open one in 8 layers: 808 blocks hold 13 more tokens.
    snapshot = make_snapshot(make_request("a", 1_603), num_free_blocks=808)

    _, quality = rated_plan(snapshot, "flexgen_plus")

    assert (quality.window, quality.expires_after) == (13, 13)


def test_stock_vllm_never_expires_and_its_bound_is_its_step() -> None:
    snapshot = make_snapshot(make_request("a", 9_000), num_free_blocks=0, max_window=32)

    _, quality = rated_plan(snapshot, "all_resident")

    assert (quality.window, quality.expires_after) == (32, 32)
    assert quality.lower_bound_s == pytest.approx(quality.latency_s)


@pytest.mark.parametrize("missing", ["profile", "h2d"])
def test_without_a_profile_or_a_link_nothing_is_predicted(missing: str) -> None:
    snapshot = dataclasses.replace(make_snapshot(make_request("a")), **{missing: None})

    plan = rated(dynamic_heuristic(snapshot), snapshot, Replan.EVERY_STEP)

    assert plan.quality is None


def test_the_quality_says_that_some_are_paused() -> None:
    snapshot = make_snapshot(make_request("a"), make_request("huge", 64_000), num_free_blocks=900)

    plan, quality = rated_plan(snapshot, "dynamic_heuristic")

    assert [placement.paused for placement in plan.placements] == [False, True]
    assert quality.serve_all is PlanStatus.INFEASIBLE


@pytest.mark.parametrize("policy", RULES)
def test_who_is_on_hold_stays_paused_where_it_is_and_lends_its_blocks(
    policy: str,
) -> None:
    held = make_request(
        "held",
        4_000,
        phase=RequestPhase.PAUSED,
        paused_age_s=60.0,
        on_hold=True,
        offloaded_layers=(3, 7),
        num_prefetch_buffers=1,
        num_blocks=(250,) * 8,
    )
    snapshot = make_snapshot(held, make_request("a", 1_600), num_free_blocks=0)

    plan, _ = rated_plan(snapshot, policy)

    assert plan.placements[0].paused
    assert plan.placements[0].offloaded_layers == (3, 7)
    assert not plan.placements[1].paused
    assert capacity_blocks(snapshot) == 2_000
