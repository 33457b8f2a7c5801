"""`dynamic-heuristic`: per request the fewest offloaded layers that fit, evenly spaced, every step.

OrbitFlow's baseline (section 5.1 (5)): it needs neither a profile nor a solver. What the executor
does where no plan is at hand is `fewest_offloaded`.
"""

import heapq

from services.placement.mirror import Mirror, blocks_with_mirror, mirror_of
from services.placement.step_time.batch import answer, capacity_blocks, members
from services.placement.step_time.patterns import RESIDENT, Pattern, balanced_layers, make_pattern
from services.placement.types import (
    EngineShape,
    Plan,
    PlanStatus,
    RequestId,
    RequestState,
    Snapshot,
)


def dynamic_heuristic(snapshot: Snapshot) -> Plan:
    """Offload one more layer of the request that has most blocks in the pool, until all fit.

    If they do not fit with everything offloaded, the newest requests are paused.
    """
    batch, mirror = list(members(snapshot)), mirror_of(snapshot)
    paused: list[RequestState] = []
    patterns = _patterns_that_fit(batch, snapshot, mirror)
    while patterns is None:
        paused.append(batch.pop())
        patterns = _patterns_that_fit(batch, snapshot, mirror)
    return Plan(
        epoch=snapshot.epoch,
        policy=snapshot.policy,
        status=PlanStatus.INFEASIBLE if paused else PlanStatus.FEASIBLE,
        placements=answer(snapshot, patterns, [request.request_id for request in paused]),
    )


def _patterns_that_fit(
    batch: list[RequestState], snapshot: Snapshot, mirror: Mirror
) -> dict[RequestId, Pattern] | None:
    """Return a pattern per request, None where nothing fits."""
    engine = snapshot.engine
    counts = [0] * len(batch)
    blocks = [blocks_with_mirror(request, RESIDENT, mirror, engine) for request in batch]
    excess = sum(blocks) - capacity_blocks(snapshot)
    largest = [(-held, index) for index, held in enumerate(blocks)]
    heapq.heapify(largest)
    while excess > 0 and largest:
        _, index = heapq.heappop(largest)
        step = _next_smaller(batch[index], counts[index], mirror, engine)
        if step is None:
            continue
        counts[index], freed = step
        blocks[index] -= freed
        excess -= freed
        heapq.heappush(largest, (-blocks[index], index))
    if excess > 0:
        return None
    return {
        request.request_id: _balanced(engine, count)
        for request, count in zip(batch, counts, strict=True)
    }


def _balanced(engine: EngineShape, count: int) -> Pattern:
    return make_pattern(balanced_layers(engine.num_groups, count), 1) if count else RESIDENT


def _next_smaller(
    request: RequestState, count: int, mirror: Mirror, engine: EngineShape
) -> tuple[int, int] | None:
    """Return the next offload count that needs fewer blocks, and how many fewer."""
    held = blocks_with_mirror(request, _balanced(engine, count), mirror, engine)
    for more in range(count + 1, engine.num_groups + 1):
        pattern = _balanced(engine, more)
        if not mirror.allows(request, pattern):
            continue
        freed = held - blocks_with_mirror(request, pattern, mirror, engine)
        if freed > 0:
            return more, freed
    return None
