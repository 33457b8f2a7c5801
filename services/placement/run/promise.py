"""How much of the pool's time readers have been promised.

A request that is read at r tokens/s needs its blocks r x T of the time, T the step of the batch
that fills the pool; one whose reader states no rate needs them always. So readers of all rates and
sizes add up in one sum.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from services.placement.run.types import RunRequest, RunSnapshot, StepCosts
from services.placement.types import RequestId

PROMISED_FRAC = 0.9  # of the pool, and of the seats
PACKING_FRAC = 0.5  # of the largest request: what whole requests waste of the pool
LINK_FRAC = 0.5  # of what offloaded layers leave of the link, that ways back may take
LEAST_LINK_FRAC = 0.01
MOST_PREFILL_FRAC = 0.8
LEAST_TURNS = 4  # requests that the pool must hold: with fewer a turn wastes too much
LEAST_TURN_S = 2.0  # that a reader parked for a newcomer has in hand, beside ways
MOST_TURN_S = 20.0  # that readers may need in hand for the link to carry all ways back


class Limit(StrEnum):
    """What keeps an engine from more readers."""

    POOL = "pool"
    SEATS = "seats"  # requests in one step
    LINK = "link"
    HOST = "host"


def reading_fracs(snapshot: RunSnapshot, members: Sequence[RunRequest]) -> dict[RequestId, float]:
    """Return the share of the time in which each must run, in [0, 1]."""
    costs = snapshot.costs
    assert costs is not None
    step_s = _full_step_s(snapshot, costs, members)
    return {request.request_id: _reading_frac(request, step_s) for request in members}


def _reading_frac(request: RunRequest, step_s: float) -> float:
    return min(1.0, request.steps_per_s * step_s) if request.rate_tps else 1.0


def _full_step_s(snapshot: RunSnapshot, costs: StepCosts, members: Sequence[RunRequest]) -> float:
    """Return the time from token to token of a batch that fills the pool, prompts included."""
    num_blocks = snapshot.num_blocks_of(members, growth=1, is_computed=True)
    frac = min(1.0, snapshot.engine.num_blocks / max(1, num_blocks))
    context = sum([request.num_tokens for request in members])
    step_s = costs.base_s + frac * (costs.token_s * len(members) + costs.context_s * context)
    return step_s / (1.0 - min(MOST_PREFILL_FRAC, snapshot.prefill_frac))


def sure_ones(snapshot: RunSnapshot, members: Iterable[RunRequest]) -> frozenset[RequestId]:
    """Return the oldest whose reading the pool sustains: no other's lateness touches them."""
    oldest_first = sorted(members, key=lambda request: -request.arrival_age_s)
    blocks = snapshot.blocks(growth=1, is_computed=True)
    num_blocks = snapshot.num_blocks_of(oldest_first, growth=1, is_computed=True)
    if snapshot.costs is None or num_blocks <= snapshot.engine.num_blocks:
        return frozenset([request.request_id for request in oldest_first])
    fracs = reading_fracs(snapshot, oldest_first)
    sure: list[RequestId] = []
    used = Used(snapshot)
    for request in oldest_first:
        used.add(request, fracs[request.request_id], blocks[request.request_id])
        if sure and used.num_blocks > snapshot.engine.num_blocks:
            break
        sure.append(request.request_id)
    return frozenset(sure)


def holds_few(snapshot: RunSnapshot, requests: Sequence[RunRequest]) -> bool:
    """Return whether the pool holds fewer than `LEAST_TURNS` requests of their mean size."""
    num_blocks = snapshot.num_blocks_of(requests, growth=1, is_computed=True)
    return LEAST_TURNS * num_blocks > snapshot.engine.num_blocks * len(requests)


def can_take_turns(snapshot: RunSnapshot, members: Sequence[RunRequest]) -> bool:
    """Return whether turns are worth their way back."""
    return not holds_few(snapshot, members)


class Used:
    """Blocks that requests have for a share of the time: what they share once, up to always."""

    def __init__(self, snapshot: RunSnapshot) -> None:
        self.num_blocks = 0.0
        self._snapshot = snapshot
        self._shares: dict[int, float] = {}  # of the time, of what several share

    def add(self, request: RunRequest, share: float, num_blocks: int) -> None:
        """Let a request of `num_blocks` have them for a `share` of the time, in [0, 1]."""
        self.num_blocks += share * num_blocks
        for part in request.prefixes:
            before = self._shares.get(part, 0.0)
            self._shares[part] = after = min(1.0, before + share)
            twice = share - (after - before)
            self.num_blocks -= twice * self._snapshot.prefix_blocks(part)


class Promise:
    """What the pool sustains of one snapshot's requests, answers to come included."""

    def __init__(self, snapshot: RunSnapshot) -> None:
        self._snapshot = snapshot
        self.turn_s = LEAST_TURN_S  # in hand of a parked reader, for the members last asked about
        self._ends: dict[RequestId, tuple[int, float]] = {}  # blocks at the end, and their load

    def keeps(self, requests: Iterable[RunRequest]) -> bool:
        """Return whether the host has room for copies of all, answers to come included.

        Without it the copies of parked ones go to others, and they are computed anew.
        """
        once = Used(self._snapshot)
        for request in requests:
            once.add(request, 1.0, self._num_kept(request))
        return once.num_blocks <= self._snapshot.engine.num_host_blocks

    def _num_kept(self, request: RunRequest) -> int:
        """Return a request's blocks at its end: at its limit, while no answer has ended."""
        if self._snapshot.mean_answer_tokens:
            return (self._ends.get(request.request_id) or self._end(request))[0]
        growth = request.num_answer_left
        return self._snapshot.num_blocks(request, growth=growth, is_computed=True)

    def holds(self, members: Sequence[RunRequest]) -> bool:
        """Return whether the pool sustains the reading of all, and the host keeps all."""
        return self._snapshot.costs is not None and self.limit(members) is None

    def limit(self, members: Sequence[RunRequest]) -> Limit | None:
        """Return what cannot be promised to all, if anything; costs must be known."""
        engine, costs = self._snapshot.engine, self._snapshot.costs
        assert costs is not None
        step_s = _full_step_s(self._snapshot, costs, members)
        reads = [_reading_frac(request, step_s) for request in members]
        ends = [self._ends.get(r.request_id) or self._end(r) for r in members]
        # One that leaves with D seconds in hand is brought back once in D / (1 - reads).
        loads_s = sum(
            [(1.0 - frac) * load_s for frac, (_, load_s) in zip(reads, ends, strict=True)]
        )
        link_frac = max(LEAST_LINK_FRAC, LINK_FRAC * self._snapshot.h2d_free_frac)
        self.turn_s = turn_s = max(LEAST_TURN_S, loads_s / link_frac)
        used, num_seats, largest = Used(self._snapshot), 0.0, 0
        for request, frac, (num_blocks, load_s) in zip(members, reads, ends, strict=True):
            share = min(1.0, frac + (1.0 - frac) * load_s / (turn_s + load_s))
            used.add(request, share, num_blocks)
            num_seats += share
            num_own = num_blocks - sum(map(self._snapshot.prefix_blocks, request.prefixes))
            largest = max(largest, num_own)
        if used.num_blocks > PROMISED_FRAC * engine.num_blocks - PACKING_FRAC * largest:
            return Limit.POOL
        if num_seats > PROMISED_FRAC * engine.max_num_seqs:
            return Limit.SEATS
        if turn_s > MOST_TURN_S:
            return Limit.LINK
        return None if self.keeps(members) else Limit.HOST

    def _end(self, request: RunRequest) -> tuple[int, float]:
        """Return a request's blocks when its answer ends, and how long the link brings them."""
        snapshot, load_s = self._snapshot, 0.0
        growth = _num_to_come(snapshot, request) + 1
        num_blocks = snapshot.num_blocks(request, growth=growth, is_computed=True)
        if snapshot.h2d_bytes_per_s:
            num_own = num_blocks - sum(map(snapshot.prefix_blocks, request.prefixes))
            load_s = num_own * snapshot.engine.block_bytes / snapshot.h2d_bytes_per_s
        end = self._ends[request.request_id] = num_blocks, load_s
        return end


def _num_to_come(snapshot: RunSnapshot, request: RunRequest) -> int:
    """Return how many tokens an answer still gets: as long as answers are, cut by its limit."""
    num_more = max(0.0, snapshot.mean_answer_tokens - request.num_output_tokens)
    return int(min(request.num_answer_left, num_more))
