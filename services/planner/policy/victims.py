"""Whom to pause, so that the rest can keep its constraints: sets to try, the better ones first.

Both orders rest on one fact: where a rest certainly fails, so does every larger rest.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import TypeAlias

from services.placement.types import RequestState
from services.planner.solver.budget import Budget

MAX_EXACT_VICTIMS = 8  # candidates up to which every set is looked at: 255 of them

Victims: TypeAlias = list[RequestState]
Hopeless: TypeAlias = Callable[[Sequence[RequestState]], bool]  # of the rest without these


def growing_sets(
    ranked: Sequence[RequestState], *, num_running: int, is_hopeless: Hopeless
) -> Iterator[Victims]:
    """Yield longer and longer beginnings of a ranking, never all that run.

    Sets whose rest certainly fails are left out; they are found by halving. From the first hopeful
    one on the sets grow ever faster.
    """
    most = min(len(ranked), num_running - 1)
    low, high = 0, most + 1  # `low` victims are not enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_hopeless(ranked[:middle]) else (low, middle)
    growth = 1
    while high < most:
        yield list(ranked[:high])
        high, growth = high + growth, growth * 2
    if most > 0:
        yield list(ranked[:most])


def smallest_sets(
    candidates: Sequence[RequestState],
    budget: Budget,
    *,
    num_running: int,
    is_hopeless: Hopeless,
) -> Iterator[Victims]:
    """Yield the sets whose rest may succeed, the least ones first, until the budget ends.

    Least is by the KV tokens of the most important requests, then of the next ones (`cost`). So
    the first set that suffices is a smallest one. Every set is looked at, so at most
    MAX_EXACT_VICTIMS candidates are taken.
    """
    assert len(candidates) <= MAX_EXACT_VICTIMS
    members = range(len(candidates))
    sets = [
        frozenset(chosen)
        for size in range(1, min(len(candidates), num_running - 1) + 1)
        for chosen in combinations(members, size)
    ]
    failed: list[frozenset[int]] = []
    for chosen in sorted(sets, key=lambda one: (cost(candidates, one), sorted(one))):
        if any(chosen <= other for other in failed):
            continue
        if not budget.allows():
            return
        budget.spend(1)
        victims = [candidates[i] for i in sorted(chosen)]
        if is_hopeless(victims):
            failed.append(chosen)
        else:
            yield victims


def cost(candidates: Sequence[RequestState], chosen: frozenset[int]) -> tuple[int, ...]:
    """Return the KV tokens of a set by priority, the most important level first."""
    levels = sorted({request.priority for request in candidates})
    return tuple(
        sum(candidates[i].num_tokens for i in chosen if candidates[i].priority == level)
        for level in levels
    )
