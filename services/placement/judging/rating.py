"""What a plan that no search made is predicted to do: step times, and how long it fits the pool."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from services.placement.mirror import mirror_of
from services.placement.step_time.batch import (
    capacity_blocks,
    demand_of,
    members,
    placed_by,
    pool_need,
    predicted_step_s,
    step_compute_s,
)
from services.placement.step_time.patterns import Pattern
from services.placement.step_time.prefill import progress_of
from services.placement.types import (
    Holder,
    Plan,
    PlanStatus,
    PrefixState,
    Quality,
    Replan,
    Snapshot,
)

Placed: TypeAlias = Sequence[tuple[Holder, Pattern]]


def rated(plan: Plan, snapshot: Snapshot, replan: Replan) -> Plan:
    """Return the plan with its quality; without a profile or a link nothing is predicted.

    `replan`: of the policy that made it; a plan that is never asked for anew holds for good.

    The lower bound is the time without any stall. The SLO does not limit how long such a plan
    holds: these policies do not look ahead for it.
    """
    if snapshot.profile is None or snapshot.h2d is None:
        return plan
    running = {p.request_id for p in plan.placements if not p.paused}
    served = [request for request in members(snapshot) if request.request_id in running]
    batch = placed_by(plan, snapshot, served)
    longest = snapshot.parameters.max_window
    lasting = longest if replan is Replan.NEVER else _num_steps(snapshot, batch)
    window = 1 if replan is Replan.EVERY_STEP else max(1, lasting)
    first_s = predicted_step_s(snapshot, batch)
    last_s = predicted_step_s(snapshot, batch, growth=window - 1)
    paused_some = len(served) < len(members(snapshot))
    quality = Quality(
        latency_s=last_s,
        first_latency_s=first_s,
        mean_latency_s=(first_s + last_s) / 2,
        objective_s=last_s,
        lower_bound_s=min(last_s, _without_stalls_s(snapshot, batch, growth=window - 1)),
        window=window,
        expires_after=lasting,
        num_nodes=0,
        serve_all=PlanStatus.INFEASIBLE if paused_some else plan.status,
    )
    return replace(plan, quality=quality)


def _num_steps(snapshot: Snapshot, batch: Placed) -> int:
    """Return for how many steps the pool certainly holds the batch, up to the longest window."""
    capacity, mirror = capacity_blocks(snapshot), mirror_of(snapshot)
    late = sum(mirror.late_blocks(one, pattern) for one, pattern in batch)
    low, high = 0, snapshot.parameters.max_window
    while low < high:
        middle = (low + high + 1) // 2
        most = sum(_most_blocks(one, pattern, snapshot, middle) for one, pattern in batch)
        low, high = (middle, high) if most + late <= capacity else (low, middle - 1)
    return low


def _most_blocks(holder: Holder, pattern: Pattern, snapshot: Snapshot, growth: int) -> int:
    """Return the most blocks that a holder needs in any of the next `growth` steps."""
    demand = demand_of(holder, snapshot.engine, growth=growth)
    if isinstance(holder, PrefixState):
        return pool_need(demand, pattern)
    num_open = snapshot.engine.geometry.max_open_blocks - demand.num_open_blocks
    sealing = int(demand.num_extra_blocks == 0) + num_open
    return pool_need(demand, pattern) + pattern.num_offloaded * sealing


def _without_stalls_s(snapshot: Snapshot, batch: Placed, *, growth: int) -> float:
    assert snapshot.profile is not None
    progress = progress_of([one for one, _ in batch], snapshot.engine)
    compute_s = step_compute_s(snapshot.engine, snapshot.profile, progress, growth)
    return snapshot.profile.outside_layers_s + sum(compute_s)
