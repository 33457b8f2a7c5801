"""How long a decode step of a batch would take, whatever of it must be on the host.

No solver: the m longest requests give up the fewest layers, evenly spaced, each copied through one
staging buffer, and the best m counts. By the planner's own formula of a step.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

from services.placement.run.types import RunRequest, RunSnapshot, StepCosts
from services.placement.step_time.patterns import balanced_layers
from services.placement.types import RequestId

KEPT_FREE_FRAC = 0.02  # of the pool: what the guard keeps before a layer comes back
ROUNDED = 1.0 + 1e-9  # more than sums are rounded by
TRIED = (1, 2, 3, 4, 8, 16, 32, 64)  # how many requests give layers up


def compute_s(costs: StepCosts, batch: Sequence[RunRequest], *, growth: int = 0) -> float:
    """Return the step's length if the pool had no end, `growth` tokens later."""
    num_tokens = sum([r.num_prompt_tokens + r.num_output_tokens for r in batch])
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
    num_groups, sizes = engine.num_groups, _sizes(snapshot, batch, growth=growth + 1)
    num_kept = engine.num_blocks * (1.0 - KEPT_FREE_FRAC)
    excess = sum(sizes) - num_kept + len(batch)  # a block of margin each
    if excess <= 0:
        return seconds
    if not snapshot.h2d_bytes_per_s:
        return math.inf
    block_s = engine.block_bytes / snapshot.h2d_bytes_per_s
    group_s = (seconds - costs.outside_s) / num_groups
    full = [size // num_groups - 1 for size in sizes]  # the open block stays
    best_s = math.inf
    for num_givers in dict.fromkeys([min(number, len(full)) for number in TRIED]):
        givers = full[:num_givers]
        num_full = sum(givers)
        # Each giver's staging buffer takes one group's full blocks, and two more are on their way.
        num_needed = excess + num_full + 2 * num_givers
        # The last layer waits for all copies, and more givers copy more.
        if costs.outside_s + block_s * num_needed + group_s > min(best_s, limit_s) * ROUNDED:
            break
        if num_needed > num_groups * num_full:
            continue  # too few
        copies = _by_number(_given(givers, num_needed), givers)
        copies_s = [num_blocks * block_s for num_blocks in copies.values()]
        step_s = costs.outside_s + _layers_s(group_s, num_groups, tuple(copies), copies_s)
        best_s = min(best_s, step_s)
        if step_s <= seconds * ROUNDED:
            break  # nothing is waited for
    return best_s


def _sizes(snapshot: RunSnapshot, batch: Sequence[RunRequest], *, growth: int) -> list[int]:
    """Return the blocks of all that gives layers up, largest first: own parts, shared ones once."""
    shared = dict.fromkeys(part for request in batch for part in request.prefixes)
    if shared:
        sizes = [snapshot.num_own_blocks(request, growth=growth) for request in batch]
        sizes += map(snapshot.prefix_blocks, shared)
    else:
        blocks = snapshot.blocks(growth=growth)
        sizes = [blocks[request.request_id] for request in batch]
    return sorted(sizes, reverse=True)


def most_tokens_in(seconds: float, batch: Iterable[RunRequest], *, step_s: float) -> int:
    """Return how many tokens decode steps of `step_s` bring a request of a batch at most."""
    return int(seconds / step_s * max([r.tokens_per_step for r in batch], default=1.0))


def longest_s(batch: Sequence[RunRequest], *, paced_frac: float, unpaced_s: float) -> float:
    """Return how long a step may take: so much of each reader's interval, and what others bear."""
    return min([paced_frac / r.steps_per_s if r.rate_tps else unpaced_s for r in batch])


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
        key = growth, frozenset([request.request_id for request in batch])
        step_s, exact_s = self._known.get(key, (0.0, 0.0))
        if not exact_s or exact_s < step_s <= limit_s:
            step_s = decode_s(self._snapshot, batch, growth=growth, limit_s=limit_s)
            self._known[key] = step_s, limit_s
        return step_s


def _given(full: Sequence[int], num_needed: float) -> list[int]:
    """Return how many groups each gives up so that `num_needed` blocks leave: enough have them.

    One gives up as many as another, or one more; the shortest fewest.
    """
    num_full = sum(full)
    each = math.ceil(num_needed / num_full)
    num_spare = each * num_full - num_needed
    given = [each] * len(full)
    for index in reversed(range(len(full))):
        if num_spare < full[index]:
            break  # nor do longer ones
        num_fewer = min(each - 1, int(num_spare // full[index])) if full[index] else 0
        given[index] -= num_fewer
        num_spare -= num_fewer * full[index]
    return given


def _by_number(given: Sequence[int], full: Sequence[int]) -> dict[int, int]:
    """Return the blocks per group of those that give up as many groups: they are copied as one."""
    num_blocks: dict[int, int] = {}
    for number, length in zip(given, full, strict=True):
        if number:
            num_blocks[number] = num_blocks.get(number, 0) + length
    return num_blocks


def _layers_s(
    group_s: float, num_groups: int, numbers: tuple[int, ...], copies_s: Sequence[float]
) -> float:
    """Return what the layers take if so many groups each are copied, through one buffer each.

    `step_timing` for groups alike. `copies_s`: of one group, by whose copies are one.
    """
    waits_s, work = 0.0, dict[int, float]()  # that is not done, by the group that needs it
    for group, released, num_next in _events(num_groups, numbers):
        for needed, index in released:
            work[needed] = work.get(needed, 0.0) + copies_s[index]
        waits_s += work.pop(group, 0.0)
        left_s = num_next * group_s
        for needed in sorted(work) if len(work) > 1 else tuple(work):
            if work[needed] > left_s:
                work[needed] -= left_s
                break
            left_s -= work.pop(needed)
    return num_groups * group_s + waits_s


Released: TypeAlias = list[tuple[int, int]]  # the group that waits for a copy, and whose it is


@lru_cache(maxsize=4096)
def _events(num_groups: int, numbers: tuple[int, ...]) -> list[tuple[int, Released, int]]:
    """Return the groups at which copies begin or are waited for, and how far the next is."""
    released: dict[int, Released] = {}
    for index, number in enumerate(numbers):
        begin = 0  # a buffer is free when the group before has been computed
        for group in balanced_layers(num_groups, number):
            released.setdefault(begin, []).append((group, index))
            released.setdefault(group, [])
            begin = group + 1
    at = [*sorted(released), num_groups]
    return [(group, released[group], after - group) for group, after in pairwise(at)]
