"""Baselines that give every request the same offload distance.

- `deepspeed`: all layers of all requests offloaded, the next layer prefetched while this one
  computes: 2 buffers (OrbitFlow, section 5.1 (1)).
- `flexgen`: one static distance, the best predicted for the largest batch of the longest requests
  at the profiled rates [(2)].
- `flexgen-plus`: the distance with the best predicted latency for the present batch [(3)].
- `slo-aware` (SelectN): the most offloading whose predicted step still meets the SLO [(4)].
- `batch-uniform`: OrbitFlow's objective over uniform distances (Fig. 14a).

A prefix that requests begin with has the same distance. When to choose anew (never, or at batch
changes) is up to the caller: these are functions of the present batch. What does not fit the pool
even so loses its newest requests (FCFS).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from services.placement.capacity import Demand
from services.placement.judging.slo import constant_step_rate, promise_of, violations_allowed
from services.placement.mirror import Mirror, blocks_with_mirror, mirror_of
from services.placement.step_time.batch import (
    answer,
    capacity_blocks,
    holders_of,
    members,
    placed_by,
    pool_need,
    predicted_step_s,
    step_compute_s,
)
from services.placement.step_time.latency import Fetch, step_timing
from services.placement.step_time.patterns import (
    RESIDENT,
    Pattern,
    even_distances,
    even_layers,
    make_pattern,
)
from services.placement.step_time.prefill import Progress
from services.placement.types import (
    EngineShape,
    Holder,
    Plan,
    PlanStatus,
    RequestState,
    Snapshot,
)

Batch: TypeAlias = Sequence[RequestState]
Placed: TypeAlias = Sequence[tuple[Holder, Pattern]]


def uniform_patterns(engine: EngineShape, num_buffers: int = 1) -> list[Pattern]:
    """Return the even patterns, from nothing offloaded to everything."""
    groups = engine.num_groups
    distances = even_distances(groups)[::-1]
    return [RESIDENT, *(make_pattern(even_layers(groups, k), num_buffers) for k in distances)]


def deepspeed(snapshot: Snapshot) -> Plan:
    """Offload everything, with the next layer's copy under way (`deepspeed`)."""
    everything = make_pattern(tuple(range(snapshot.engine.num_groups)), 2)
    return _place(snapshot, lambda batch: everything)


def flexgen(snapshot: Snapshot) -> Plan:
    """Use one distance whatever the batch, chosen for the worst one (`flexgen`)."""
    pattern = _static_pattern(snapshot)
    return _place(snapshot, lambda batch: pattern)


def flexgen_plus(snapshot: Snapshot) -> Plan:
    """Use the fastest distance for this batch (`flexgen-plus`)."""
    return _place(snapshot, lambda batch: _fastest(snapshot, batch))


def slo_aware(snapshot: Snapshot) -> Plan:
    """Offload as much as the tightest SLO allows, else take the fastest (`slo-aware`, SelectN)."""

    def choose(batch: Batch) -> Pattern:
        bounds = [request.slo_s for request in batch if request.slo_s is not None]
        for pattern in reversed(_fitting(snapshot, batch)):
            step_s = predicted_step_s(snapshot, _all_in(snapshot, batch, pattern))
            if step_s <= min(bounds, default=float("inf")):
                return pattern
        return _fastest(snapshot, batch)

    return _place(snapshot, choose)


def batch_uniform(snapshot: Snapshot) -> Plan:
    """Use the fastest distance, and say whether it keeps the SLO (`batch-uniform`, Fig. 14a).

    Optimal over uniform distances by trying each.
    """
    plan = flexgen_plus(snapshot)
    if plan.status is PlanStatus.INFEASIBLE:
        return plan
    batch = members(snapshot)
    step_s = predicted_step_s(snapshot, placed_by(plan, snapshot, batch))
    parameters = snapshot.parameters
    promises = [promise_of(r, deposit=parameters.deposit is True) for r in batch]
    allowed = violations_allowed(parameters, num_running=len(batch), num_missed=0)
    rate = constant_step_rate([p for p in promises if p is not None], step_s, parameters.min_window)
    kept = rate <= allowed
    return replace(plan, status=PlanStatus.OPTIMAL if kept else PlanStatus.INFEASIBLE)


def _static_pattern(snapshot: Snapshot) -> Pattern:
    """Return the best distance for the batch cap times the longest request."""
    engine = snapshot.engine
    assert snapshot.profile is not None
    assert snapshot.h2d is not None
    longest = engine.max_model_len or max((r.num_tokens for r in snapshot.requests), default=1)
    demand = Demand(num_tokens=longest, block_size=engine.block_size, num_groups=engine.num_groups)
    progress = [Progress(num_tokens=longest)] * engine.max_num_seqs
    compute_s = step_compute_s(engine, snapshot.profile, progress, 0)
    link = snapshot.h2d.at_peak()
    layer_s = engine.max_num_seqs * link.copy_s(demand.num_full_blocks * engine.block_bytes)
    patterns = uniform_patterns(engine)
    fitting = [
        pattern
        for pattern in patterns
        if engine.max_num_seqs * pool_need(demand, pattern) <= engine.num_blocks
    ]
    return min(
        fitting or patterns[-1:],
        key=lambda pattern: (
            step_timing(compute_s, [Fetch(pattern=pattern, layer_s=layer_s)]).total_s
        ),
    )


def _fitting(snapshot: Snapshot, batch: Batch) -> list[Pattern]:
    """Return the uniform patterns that fit, from the least offloading to the most."""
    engine, mirror, capacity = snapshot.engine, mirror_of(snapshot), capacity_blocks(snapshot)
    return [
        pattern
        for pattern in uniform_patterns(engine)
        if _blocks(_placed(snapshot, batch, pattern, mirror), mirror, engine) <= capacity
    ]


def _all_in(snapshot: Snapshot, batch: Batch, pattern: Pattern) -> Placed:
    return [(one, pattern) for one in holders_of(snapshot, batch)]


def _placed(snapshot: Snapshot, batch: Batch, pattern: Pattern, mirror: Mirror) -> Placed:
    """Give each holder the pattern, but for those whose layers are not on the host yet."""
    return [
        (one, pattern if mirror.allows(one, pattern) else RESIDENT)
        for one in holders_of(snapshot, batch)
    ]


def _blocks(placed: Placed, mirror: Mirror, engine: EngineShape) -> int:
    return sum(blocks_with_mirror(r, pattern, mirror, engine) for r, pattern in placed)


def _fastest(snapshot: Snapshot, batch: Batch) -> Pattern:
    return min(
        _fitting(snapshot, batch) or uniform_patterns(snapshot.engine)[-1:],
        key=lambda pattern: predicted_step_s(snapshot, _all_in(snapshot, batch, pattern)),
    )


def _place(snapshot: Snapshot, choose: Callable[[Batch], Pattern]) -> Plan:
    """Give all members one pattern; pause the newest until the rest fits.

    A request whose layers are not on the host yet stays resident.
    """
    capacity, mirror = capacity_blocks(snapshot), mirror_of(snapshot)
    batch = list(members(snapshot))
    paused: list[RequestState] = []
    while True:
        placed = _placed(snapshot, batch, choose(batch), mirror)
        if _blocks(placed, mirror, snapshot.engine) <= capacity or not batch:
            break
        paused.append(batch.pop())
    status = PlanStatus.FEASIBLE if not paused else PlanStatus.INFEASIBLE
    patterns = {one.holder_id: pattern for one, pattern in placed}
    return answer(snapshot, status, patterns, [request.request_id for request in paused])
