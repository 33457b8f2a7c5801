"""Making plans in tests, each checked against the pool at every step of its window."""

from functools import cache

from services.placement.mirror import mirror_of
from services.placement.step_time.batch import capacity_blocks, demand_of, placed_by, pool_need
from services.placement.types import Plan, PlanStatus, Snapshot
from services.planner.policy.orbitflow import OrbitFlow
from services.planner.policy.policies import make_plan
from services.planner.solver.budget import NodeBudget
from services.planner.solver.solver import warm_solver
from tests.plans import running

GOOD = (PlanStatus.OPTIMAL, PlanStatus.FEASIBLE)


@cache
def optimiser() -> OrbitFlow:
    return OrbitFlow(warm_solver)


def plan_of(snapshot: Snapshot, nodes: int = 3_000) -> Plan:
    plan = make_plan(snapshot, NodeBudget(nodes), optimiser())
    assert plan.quality is not None
    for growth in range(1, plan.quality.window + 1):
        assert blocks_needed(snapshot, plan, growth) <= capacity_blocks(snapshot)
    assert [p.request_id for p in plan.placements] == [r.request_id for r in snapshot.requests]
    assert [p.prefix_id for p in plan.prefixes] == [p.prefix_id for p in snapshot.prefixes]
    return plan


def blocks_needed(snapshot: Snapshot, plan: Plan, growth: int) -> int:
    """Return the pool blocks of what runs, after `growth` more tokens, and of late copies."""
    mirror, total = mirror_of(snapshot), 0
    for holder, pattern in placed_by(plan, snapshot, running(snapshot, plan)):
        assert mirror.allows(holder, pattern)
        total += pool_need(demand_of(holder, snapshot.engine, growth=growth), pattern)
        total += mirror.late_blocks(holder, pattern)
    return total


def paused(plan: Plan) -> list[str]:
    return [placement.request_id for placement in plan.placements if placement.paused]
