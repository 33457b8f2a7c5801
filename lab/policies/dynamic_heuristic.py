"""`dynamic-heuristic`: per request the fewest offloaded layers that fit, evenly spaced, every step.

OrbitFlow's baseline (section 5.1 (5)): it needs neither a profile nor a solver. What the executor
does where no plan is at hand is `fewest_offloaded`.
"""

import heapq
from collections.abc import Iterator

from services.placement.mirror import Mirror, blocks_with_mirror, mirror_of
from services.placement.step_time.batch import answer, capacity_blocks, members
from services.placement.step_time.patterns import RESIDENT, Pattern, balanced_pattern
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
    patterns = [RESIDENT] * len(batch)
    blocks = [blocks_with_mirror(request, RESIDENT, mirror, engine) for request in batch]
    smaller = [_smaller(r, held, mirror, engine) for r, held in zip(batch, blocks, strict=True)]
    excess = sum(blocks) - capacity_blocks(snapshot)
    largest = [(-held, index) for index, held in enumerate(blocks)]
    heapq.heapify(largest)
    while excess > 0 and largest:
        negated, index = heapq.heappop(largest)
        step = next(smaller[index], None)
        if step is None:
            continue
        patterns[index], held = step
        excess += negated + held
        heapq.heappush(largest, (-held, index))
    if excess > 0:
        return None
    return {request.request_id: pattern for request, pattern in zip(batch, patterns, strict=True)}


def _smaller(
    request: RequestState, held: int, mirror: Mirror, engine: EngineShape
) -> Iterator[tuple[Pattern, int]]:
    """Yield evenly spaced patterns that need fewer and fewer blocks than `held`, with these."""
    for count in range(1, engine.num_groups + 1):
        pattern = balanced_pattern(engine.num_groups, count)
        if not mirror.allows(request, pattern):
            continue
        fewer = blocks_with_mirror(request, pattern, mirror, engine)
        if fewer < held:
            held = fewer
            yield pattern, held
