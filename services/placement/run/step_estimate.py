"""How long a decode step of a batch would take, whatever of it must be on the host.

No solver: the m longest requests give up the fewest layers, evenly spaced, each copied through one
staging buffer, and the best m counts. By the planner's own formula of a step.
"""

import math
from collections.abc import Sequence
from functools import cache

from services.placement.latency import Fetch, step_timing
from services.placement.patterns import Pattern, balanced_layers, make_pattern
from services.placement.run.types import RunRequest, RunSnapshot, StepCosts

KEPT_FREE_FRAC = 0.02  # of the pool: what the guard keeps before a layer comes back
TRIED = (1, 2, 3, 4, 8, 16, 32, 64)  # how many requests give layers up


def compute_s(costs: StepCosts, batch: Sequence[RunRequest], *, growth: int = 0) -> float:
    """Return the step's length if the pool had no end, `growth` tokens later."""
    context = sum(request.num_tokens + growth for request in batch)
    return costs.decode_s(len(batch), context)


def decode_s(
    snapshot: RunSnapshot,
    batch: Sequence[RunRequest],
    *,
    growth: int = 0,
    limit_s: float = math.inf,
) -> float:
    """Return the step's length, `growth` tokens later; inf where the batch cannot run at all.

    Beyond `limit_s` any longer length does: what leaves is copied in every step.
    """
    costs, engine = snapshot.costs, snapshot.engine
    assert costs is not None
    seconds = compute_s(costs, batch, growth=growth)
    rows = sorted((snapshot.num_rows(r.num_tokens + growth + 1) for r in batch), reverse=True)
    num_kept = engine.num_blocks * (1.0 - KEPT_FREE_FRAC)
    excess = engine.num_groups * sum(rows) - num_kept + len(batch)
    if excess <= 0:
        return seconds
    if not snapshot.h2d_bytes_per_s:
        return math.inf
    block_s = engine.block_bytes / snapshot.h2d_bytes_per_s
    if excess * block_s > limit_s:
        return max(seconds, excess * block_s)
    group_s = (seconds - costs.outside_s) / engine.num_groups
    best_s = math.inf
    for num_givers in dict.fromkeys(min(number, len(rows)) for number in TRIED):
        full = [row - 1 for row in rows[:num_givers]]  # the open block stays
        given = _given(full, excess + sum(full) + 2 * num_givers, engine.num_groups)
        if given is None:
            continue
        copied_s = block_s * sum(n * length for n, length in zip(given, full, strict=True))
        if copied_s >= best_s:
            continue  # it is no shorter than its copies
        fetches = [
            Fetch(pattern=_pattern(engine.num_groups, number), layer_s=num_blocks * block_s)
            for number, num_blocks in _by_number(given, full).items()
        ]
        step_s = costs.outside_s + step_timing([group_s] * engine.num_groups, fetches).total_s
        best_s = min(best_s, step_s)
        if step_s <= seconds * (1.0 + 1e-9):
            break  # nothing is waited for
    return best_s


def _given(full: Sequence[int], num_needed: float, num_groups: int) -> list[int] | None:
    """Return how many groups each gives up so that `num_needed` blocks leave; None: too few do.

    One gives up as many as another, or one more; the shortest fewest.
    """
    if num_needed > num_groups * sum(full):
        return None
    each = math.ceil(num_needed / sum(full))
    num_spare = each * sum(full) - num_needed
    given = [each] * len(full)
    for index in reversed(range(len(full))):
        num_fewer = min(each - 1, int(num_spare // full[index])) if full[index] else 0
        given[index] -= num_fewer
        num_spare -= num_fewer * full[index]
    return given


def _by_number(given: Sequence[int], full: Sequence[int]) -> dict[int, int]:
    """Return the blocks per group of those who give up as many groups: they are copied as one."""
    num_blocks: dict[int, int] = {}
    for number, length in zip(given, full, strict=True):
        if number:
            num_blocks[number] = num_blocks.get(number, 0) + length
    return num_blocks


@cache
def _pattern(num_groups: int, num_offloaded: int) -> Pattern:
    return make_pattern(balanced_layers(num_groups, num_offloaded), 1)
