"""The capacity guard's rule: per request the fewest offloaded layers with which everybody fits.

Requests are served in scheduling order: each keeps as much in the pool as leaves every later one
its minimum (everything offloaded, one staging buffer). So the oldest request is the last to be
offloaded, and a batch that fits offloads nothing.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from services.placement.blocks import (
    RESIDENT,
    BlockGeometry,
    Residency,
    min_request_blocks,
    num_request_blocks,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one request needs."""

    num_tokens: int  # whose KV has to fit, growth included, >= 1
    offloadable: bool  # False if its KV has no room in host memory
    min_offloaded: int = 0  # layer groups that leave in any case, [0, num_groups]
    num_side_blocks: int = 0  # of groups that never leave
    num_ahead: int = 0  # tokens behind `num_tokens` that have to have room: drafts


def fewest_offloaded(
    demands: Sequence[Claim], geometry: BlockGeometry, *, num_blocks: int, max_staging: int
) -> list[Residency | None]:
    """Return the residency of each request, in order; None for one that does not fit.

    `num_blocks` is what all of them share, `max_staging` the most buffers per request (1 or 2). A
    request that does not fit takes nothing; the ones after it may still fit.
    """
    ladder = _ladder(geometry.num_groups, max_staging)
    minima = [_minimum(demand, geometry) for demand in demands]
    admitted = _admitted(minima, num_blocks)
    num_later = sum(blocks for blocks, fits in zip(minima, admitted, strict=True) if fits)
    num_free = num_blocks
    answer: list[Residency | None] = []
    for demand, minimum, fits in zip(demands, minima, admitted, strict=True):
        if not fits:
            answer.append(None)
            continue
        num_later -= minimum
        chosen, num_used = _first_that_fits(demand, geometry, ladder, num_free - num_later)
        num_free -= num_used
        answer.append(chosen)
    return answer


@cache
def _ladder(num_groups: int, max_staging: int) -> tuple[Residency, ...]:
    """Return the residencies to try: fewest offloaded first, then most buffers."""
    rungs = [RESIDENT]
    for num_offloaded in range(1, num_groups + 1):
        for num_staging in range(min(max_staging, num_offloaded), 0, -1):
            rungs.append(Residency(num_offloaded=num_offloaded, num_staging=num_staging))
    return tuple(rungs)


def _minimum(demand: Claim, geometry: BlockGeometry) -> int:
    if not demand.offloadable:
        return _num_blocks(demand, geometry, RESIDENT)
    num_blocks = min_request_blocks(
        geometry, num_tokens=demand.num_tokens, num_ahead=demand.num_ahead
    )
    return num_blocks + demand.num_side_blocks


def _num_blocks(demand: Claim, geometry: BlockGeometry, residency: Residency) -> int:
    own = num_request_blocks(
        geometry, residency, num_tokens=demand.num_tokens, num_ahead=demand.num_ahead
    )
    return own + demand.num_side_blocks


def _admitted(minima: Sequence[int], num_blocks: int) -> list[bool]:
    num_free = num_blocks
    fits = []
    for blocks in minima:
        fits.append(blocks <= num_free)
        if fits[-1]:
            num_free -= blocks
    return fits


def _first_that_fits(
    demand: Claim, geometry: BlockGeometry, ladder: Sequence[Residency], num_free: int
) -> tuple[Residency, int]:
    """Return the first rung that fits, and its blocks: no rung takes more than the one before."""

    def num_blocks(residency: Residency) -> int:
        return _num_blocks(demand, geometry, residency)

    if not demand.offloadable:
        return RESIDENT, num_blocks(RESIDENT)
    lowest = bisect_left(ladder, demand.min_offloaded, key=lambda rung: rung.num_offloaded)
    place = bisect_left(ladder, True, lo=lowest, key=lambda rung: num_blocks(rung) <= num_free)
    assert place < len(ladder), "a request that was admitted by its minimum fits with it"
    return ladder[place], num_blocks(ladder[place])


def spread_order(num_groups: int) -> tuple[int, ...]:
    """Return the order in which layer groups leave the pool: evenly spaced at every count.

    Each next group halves the widest gap between those already offloaded, so that one more group
    moves one group only, and between two offloaded groups there is always compute that hides a
    copy.
    """
    chosen: list[int] = []
    remaining = set(range(num_groups))
    while remaining:
        # Group 0 has no compute before it in the step: it goes last among equals.
        best = max(remaining, key=lambda group: (_gap(group, chosen, num_groups), group))
        chosen.append(best)
        remaining.remove(best)
    return tuple(chosen)


def _gap(group: int, chosen: Sequence[int], num_groups: int) -> int:
    """Return the cyclic distance to the nearest chosen group: steps follow each other."""
    if not chosen:
        return num_groups
    return min(min((group - c) % num_groups, (c - group) % num_groups) for c in chosen)
