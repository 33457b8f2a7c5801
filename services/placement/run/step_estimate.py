"""How long a decode step of a batch would take, whatever of it must be on the host.

No solver: the m longest requests give up the fewest layers, evenly spaced, each copied through one
staging buffer, and the best m counts. By the planner's own formula of a step.
"""

import math
from collections.abc import Sequence
from functools import cache

from services.placement.run.types import RunRequest, RunSnapshot, StepCosts
from services.placement.step_time.latency import Fetch, step_timing
from services.placement.step_time.patterns import Pattern, balanced_layers, make_pattern
from services.placement.types import RequestId

KEPT_FREE_FRAC = 0.02  # of the pool: what the guard keeps before a layer comes back
ROUNDED = 1.0 + 1e-9  # more than sums are rounded by
TRIED = (1, 2, 3, 4, 8, 16, 32, 64)  # how many requests give layers up


def compute_s(costs: StepCosts, batch: Sequence[RunRequest], *, growth: int = 0) -> float:
    """Return the step's length if the pool had no end, `growth` tokens later."""
    num_tokens = sum([request.num_tokens for request in batch])
    return costs.decode_s(len(batch), num_tokens + growth * len(batch))


def decode_s(
    snapshot: RunSnapshot,
    batch: Sequence[RunRequest],
    *,
    growth: int = 0,
    limit_s: float = math.inf,
) -> float:
    """Return the step's length, `growth` tokens later; inf where the batch cannot run at all.

    Beyond `limit_s` any longer length does.
    """
    costs, engine = snapshot.costs, snapshot.engine
    assert costs is not None
    seconds = compute_s(costs, batch, growth=growth)
    size, grown = engine.block_size, growth + 1
    rows = sorted([-(-(request.num_tokens + grown) // size) for request in batch], reverse=True)
    num_kept = engine.num_blocks * (1.0 - KEPT_FREE_FRAC)
    excess = engine.num_groups * sum(rows) - num_kept + len(batch)
    if excess <= 0:
        return seconds
    if not snapshot.h2d_bytes_per_s:
        return math.inf
    block_s = engine.block_bytes / snapshot.h2d_bytes_per_s
    group_s = (seconds - costs.outside_s) / engine.num_groups
    best_s = math.inf
    for num_givers in dict.fromkeys(min(number, len(rows)) for number in TRIED):
        full = [row - 1 for row in rows[:num_givers]]  # the open block stays
        num_needed = excess + sum(full) + 2 * num_givers
        # The last layer waits for all copies, and more givers copy more.
        if costs.outside_s + block_s * num_needed + group_s > min(best_s, limit_s) * ROUNDED:
            break
        given = _given(full, num_needed, engine.num_groups)
        if given is None:
            continue
        fetches = [
            Fetch(pattern=_pattern(engine.num_groups, number), layer_s=num_blocks * block_s)
            for number, num_blocks in _by_number(given, full).items()
        ]
        step_s = costs.outside_s + step_timing([group_s] * engine.num_groups, fetches).total_s
        best_s = min(best_s, step_s)
        if step_s <= seconds * ROUNDED:
            break  # nothing is waited for
    return best_s


def longest_s(batch: Sequence[RunRequest], *, paced_frac: float, unpaced_s: float) -> float:
    """Return how long a step may take: so much of each reader's interval, and what others bear."""
    return min(paced_frac / r.rate_tps if r.rate_tps else unpaced_s for r in batch)


class Steps:
    """The predicted steps of one snapshot's batches, each predicted once."""

    def __init__(self, snapshot: RunSnapshot) -> None:
        self._snapshot = snapshot
        # By growth and batch: the step, and the limit up to which it is exact.
        self._known: dict[tuple[int, frozenset[RequestId]], tuple[float, float]] = {}

    def decode_s(
        self, batch: Sequence[RunRequest], *, growth: int, limit_s: float = math.inf
    ) -> float:
        """Return `decode_s` of a batch."""
        key = growth, frozenset(request.request_id for request in batch)
        step_s, exact_s = self._known.get(key, (0.0, 0.0))
        if not exact_s or exact_s < step_s <= limit_s:
            step_s = decode_s(self._snapshot, batch, growth=growth, limit_s=limit_s)
            self._known[key] = step_s, limit_s
        return step_s


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
        if num_spare < full[index]:
            break  # nor do longer ones
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
