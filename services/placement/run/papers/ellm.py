"""eLLM (EuroSys '26): part of every request's KV is not kept, and computed anew in every step.

The leading blocks of a request that decodes share one block for all layer groups: each layer's KV
is there while that layer runs. How many requests run, b, and the share r of their KV that is not
kept are Eq. 5 under Eq. 1 in the form that is consistent: a step has a part that does not grow with
b, and it, without any time in the queue, is within the SLO.

    min T(b, r) / b   so that   T(b, r) <= SLO   and the KV of b requests fits

A step with more to compute is longer, so that of each b only the least r with which b requests fit
can be the best: the search is over b alone, first come first served.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.placement.run.resume import ResumeWay
from services.placement.run.types import IDLE, RunDecision, RunRequest, RunSnapshot

RECOMPUTE = frozenset({ResumeWay.RECOMPUTE})


@dataclass(frozen=True, slots=True, kw_only=True)
class EllmRules:
    """What of Eq. 5 is given instead of chosen."""

    uncached_frac: float | None = None  # r, [0, 1]; None: the best


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A point of Eq. 5."""

    num_requests: int  # b
    uncached_frac: float  # r


def best_batch(
    sizes: Iterable[int],
    *,
    least_frac: Callable[[int], float | None],
    step_s: Callable[[int, float], float],
    slo_s: Callable[[int], float],
) -> Batch | None:
    """Return the batch of least T / b, of equals the largest; None if no size is within bounds.

    `least_frac(b)`: the least r with which b requests fit, None if they do with none.
    """
    best, best_s = None, math.inf
    for size in sizes:
        frac = least_frac(size)
        if frac is None:
            continue
        seconds = step_s(size, frac)
        if seconds <= slo_s(size) and seconds / size <= best_s:
            best, best_s = Batch(num_requests=size, uncached_frac=frac), seconds / size
    return best


def decide(snapshot: RunSnapshot, rules: EllmRules = EllmRules()) -> RunDecision:
    """Return a decision for the next step.

    What runs stays while it fits with nothing uncached, and what fits so within the SLO comes in.
    """
    if not snapshot.requests:
        return IDLE
    batch = Prefixes(snapshot, rules)
    first = batch.num_fitting()
    chosen = Batch(num_requests=first, uncached_frac=rules.uncached_frac or 0.0)
    if rules.uncached_frac is None:
        found = best_batch(
            range(first, batch.most + 1),
            least_frac=batch.least_frac,
            step_s=batch.step_s,
            slo_s=lambda size: batch.slo_s(size) if size > first else math.inf,
        )
        chosen = found or chosen
    run, rest = batch.order[: chosen.num_requests], batch.order[chosen.num_requests :]
    uncached = {r.request_id: batch.num_uncached(r, chosen.uncached_frac) for r in run}
    return RunDecision(
        run=tuple(request.request_id for request in run),
        park=frozenset(request.request_id for request in rest if request.runs),
        ways=RECOMPUTE,
        uncached_blocks={request_id: number for request_id, number in uncached.items() if number},
    )


class Prefixes:
    """The first b requests, running ones first, for all b: blocks, step, SLO."""

    def __init__(self, snapshot: RunSnapshot, rules: EllmRules) -> None:
        running = sorted((r for r in snapshot.requests if r.runs), key=lambda r: -r.arrival_age_s)
        self.order = [*running, *(r for r in snapshot.requests if not r.runs)]
        self._snapshot, self._rules = snapshot, rules
        self._block_size = snapshot.engine.block_size
        self._rows = _sums(snapshot.num_rows(r.num_tokens + 1) for r in self.order)
        self._droppable = _sums(self._num_droppable(r) for r in self.order)
        self._full = _sums(self._num_full(r) for r in self.order)
        given = rules.uncached_frac or 0.0
        self._given = _sums(self._rounded(given * self._num_full(r)) for r in self.order)
        self._tokens = _sums(r.num_tokens for r in self.order)
        self._num_running, self._room = len(running), snapshot.engine.num_blocks
        self.most = min(len(self.order), max(snapshot.engine.max_num_seqs, len(running)))

    def num_fitting(self) -> int:
        """Return how many run with no more uncached than is given; those that run need no SLO."""
        given, size = self._rules.uncached_frac or 0.0, 1
        while size < self.most and self._fits(size + 1, given):
            if size >= self._num_running and self.step_s(size + 1, given) > self.slo_s(size + 1):
                break
            size += 1
        return size

    def _fits(self, size: int, frac: float) -> bool:
        within = self._num_recomputed(size, frac) <= self._most_recomputed(size)
        return within and self._num_blocks(size, frac) <= self._room

    def _num_droppable(self, request: RunRequest) -> int:
        """Return how many blocks need not be kept now: none before the prompt is computed."""
        return self._num_full(request) if request.runs and request.has_begun else 0

    def _num_full(self, request: RunRequest) -> int:
        return (request.num_tokens - 1) // self._block_size

    def num_uncached(self, request: RunRequest, frac: float) -> int:
        """Return r of a request in blocks; what is chosen is rounded up, so that it suffices."""
        return self._rounded(frac * self._num_droppable(request))

    def _rounded(self, number: float) -> int:
        return math.ceil(number) if self._rules.uncached_frac is None else round(number)

    def _num_blocks(self, size: int, frac: float) -> int:
        groups = self._snapshot.engine.num_groups
        num_uncached = sum(self.num_uncached(r, frac) for r in self.order[:size]) if frac else 0
        return groups * self._rows[size] - (groups - 1) * num_uncached

    def least_frac(self, size: int) -> float | None:
        """Return the least r with which so many fit; None if they do with none."""
        groups = self._snapshot.engine.num_groups
        excess = groups * self._rows[size] - self._room
        if excess <= 0:
            return 0.0
        saved = (groups - 1) * self._droppable[size]
        frac = excess / saved if excess <= saved else None
        return frac if frac is not None and self._fits(size, frac) else None

    def _num_recomputed(self, size: int, frac: float) -> float:
        """Return the tokens computed anew in each step, once all of them decode."""
        given = self._rules.uncached_frac is not None
        return (self._given[size] if given else frac * self._full[size]) * self._block_size

    def _most_recomputed(self, size: int) -> int:
        return self._snapshot.engine.max_num_batched_tokens - size

    def step_s(self, size: int, frac: float) -> float:
        """Return the length of a step; inf where it is not known what computing anew costs."""
        costs, num_recomputed = self._snapshot.costs, self._num_recomputed(size, frac)
        seconds = 1.0 if costs is None else costs.decode_s(size, self._tokens[size])
        if not num_recomputed:
            return seconds
        if costs is None or not costs.chunk_token_s:
            return math.inf
        return seconds + costs.prompt_s(num_recomputed)

    def slo_s(self, size: int) -> float:
        if self._snapshot.costs is None:
            return math.inf
        rates = [request.steps_per_s for request in self.order[:size]]
        return 1.0 / max(rates) if any(rates) else math.inf


def _sums(numbers: Iterable[int]) -> Sequence[int]:
    """Return the sum of the first b numbers, for all b."""
    sums = [0]
    for number in numbers:
        sums.append(sums[-1] + number)
    return sums
