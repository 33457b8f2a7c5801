"""`dynamic-heuristic`: per request the fewest offloaded layers that fit, evenly spaced, every step.

OrbitFlow's baseline (section 5.1 (5)): it needs neither a profile nor a solver. What the executor
does where no plan is at hand is `fewest_offloaded`.
"""

import heapq
from collections.abc import Iterator

from services.placement.mirror import Mirror, blocks_with_mirror, mirror_of
from services.placement.step_time.batch import answer, capacity_blocks, holders_of, members
from services.placement.step_time.patterns import RESIDENT, Pattern, balanced_pattern
from services.placement.types import (
    EngineShape,
    Holder,
    Plan,
    PlanStatus,
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
    status = PlanStatus.INFEASIBLE if paused else PlanStatus.FEASIBLE
    return answer(snapshot, status, patterns, [request.request_id for request in paused])


def _patterns_that_fit(
    batch: list[RequestState], snapshot: Snapshot, mirror: Mirror
) -> dict[str, Pattern] | None:
    """Return a pattern per request, and per prefix that one begins with; None if nothing fits."""
    engine, holders = snapshot.engine, holders_of(snapshot, batch)
    patterns = [RESIDENT] * len(holders)
    blocks = [blocks_with_mirror(one, RESIDENT, mirror, engine) for one in holders]
    smaller = [
        _smaller(one, held, mirror, engine) for one, held in zip(holders, blocks, strict=True)
    ]
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
    return {one.holder_id: pattern for one, pattern in zip(holders, patterns, strict=True)}


def _smaller(
    holder: Holder, held: int, mirror: Mirror, engine: EngineShape
) -> Iterator[tuple[Pattern, int]]:
    """Yield evenly spaced patterns that need fewer and fewer blocks than `held`, with these."""
    for count in range(1, engine.num_groups + 1):
        pattern = balanced_pattern(engine.num_groups, count)
        if not mirror.allows(holder, pattern):
            continue
        fewer = blocks_with_mirror(holder, pattern, mirror, engine)
        if fewer < held:
            held = fewer
            yield pattern, held
