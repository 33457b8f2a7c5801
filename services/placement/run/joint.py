"""`joint`: of some sets that could run, the one that serves its readers best, by prediction.

The candidates are plain first come first served residency, always; and for each number of readers
held back, those with most in hand first, who could come in their place: whole requests in the pool,
then more with layers on the host for as long as nobody reads slower than he reads. Where the layers
of whoever runs live is the optimiser's to say, and its formula predicts the step.

A set is rated by the tokens per second that readers can use: what each needs within a turn beyond
what he has in hand, less what readers who are left out lack before they could be back. Only sets
count that generate as much as plain residency, so none is chosen that is worse than it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.placement.run.promise import can_promise, can_take_turns
from services.placement.run.room import Room
from services.placement.run.step_estimate import compute_s, decode_s
from services.placement.run.types import (
    IDLE,
    RunDecision,
    RunPhase,
    RunRequest,
    RunSnapshot,
)
from services.placement.types import RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class JointRules:
    """What may be changed."""

    turn_s: float = 5.0  # over which a set is rated
    least_gain_frac: float = 0.005  # of what plain residency generates: what a change must bring
    most_loss_frac: float = 0.01  # of what plain residency generates, that another set may lose
    tight_frac: float = 0.95  # of a reader's interval that a step with layers away may take
    hide_frac: float = 1.05  # of its compute that a step takes at most for who states no rate
    growth_tokens: int = 48  # by which all have grown when a step is judged
    due_s: float = 1.0  # in hand, at which a reader must be on his way back
    least_s: float = 2.0  # in hand, beyond twice his way back, of a reader who is held back
    most_held: int = 4  # in one decision
    period_s: float = 0.25  # between decisions; shortest turn
    unsaved_blocks: int = 3  # of the newest of who is held back that need no copy yet


DEFAULT_RULES = JointRules()
NEXT_TOKENS = 1  # that everybody who runs must have room for


def decide(snapshot: RunSnapshot, rules: JointRules = DEFAULT_RULES) -> RunDecision:
    """Return the best candidate, as who runs and who leaves."""
    if not snapshot.requests:
        return IDLE
    batch = best(snapshot, rules)
    runs = {request.request_id for request in batch}
    park = frozenset(r.request_id for r in snapshot.requests if r.runs and r.request_id not in runs)
    changes = bool(park) or any(not request.runs for request in batch)
    costs = snapshot.costs
    step_s = compute_s(costs, batch) if costs else rules.period_s
    num_ahead = int(rules.period_s / step_s) + NEXT_TOKENS
    is_full = not Room(snapshot, growth=num_ahead).fits(batch)
    return RunDecision(
        run=tuple(request.request_id for request in batch),
        park=park,
        offloads=not Room(snapshot, growth=NEXT_TOKENS).fits(batch),
        valid_for_s=0.0 if changes or is_full else rules.period_s,
    )


def best(snapshot: RunSnapshot, rules: JointRules = DEFAULT_RULES) -> list[RunRequest]:
    """Return the candidate of the highest rate; plain residency where nothing is measured."""
    candidates = Candidates(snapshot, rules)
    chosen = candidates.plain()
    if snapshot.costs is None:
        return chosen
    rating = Rating(snapshot, rules)
    generated = rating.generated(chosen)
    least = (1.0 - rules.most_loss_frac) * generated
    most = rating.usable(chosen) + rules.least_gain_frac * generated
    for batch in candidates.others(rating):
        if rating.bound(batch) <= most or rating.generated(batch) < least:
            continue
        usable = rating.usable(batch)
        if usable > most:
            chosen, most = batch, usable
    return chosen


class Rating:
    """What a set is worth, in tokens per second. The snapshot has costs."""

    def __init__(self, snapshot: RunSnapshot, rules: JointRules = DEFAULT_RULES) -> None:
        assert snapshot.costs is not None
        self._snapshot, self._rules, self._costs = snapshot, rules, snapshot.costs
        self._room = Room(snapshot, growth=NEXT_TOKENS)
        self._steps_s: dict[frozenset[RequestId], float] = {}

    def usable(self, batch: Sequence[RunRequest]) -> float:
        """Return what the readers of a set can use of it, less what the others lack."""
        return self._usable(batch, self.step_s(batch))

    def bound(self, batch: Sequence[RunRequest]) -> float:
        """Return what they could use if no step waited for a copy: no placement gives more."""
        return self._usable(batch, self._compute_s(batch))

    def generated(self, batch: Sequence[RunRequest]) -> float:
        """Return what a set generates, used or not."""
        step_s = self.step_s(batch)
        return sum(self._num_tokens(request, step_s) for request in batch) / self._rules.turn_s

    def step_s(self, batch: Sequence[RunRequest]) -> float:
        """Return the predicted step, when all have grown."""
        if self._room.fits(batch):
            return self._compute_s(batch)
        key = frozenset(request.request_id for request in batch)
        if key not in self._steps_s:
            growth = self._rules.growth_tokens
            self._steps_s[key] = decode_s(self._snapshot, batch, growth=growth)
        return self._steps_s[key]

    def is_in_time(self, batch: Sequence[RunRequest]) -> bool:
        """Return whether all have a seat and nobody would read slower than he reads."""
        if len(batch) > self._snapshot.engine.max_num_seqs:
            return False
        unpaced_s, frac = self._rules.hide_frac * self._compute_s(batch), self._rules.tight_frac
        limit_s = min(frac / r.rate_tps if r.rate_tps else unpaced_s for r in batch)
        return self.step_s(batch) <= limit_s

    def _compute_s(self, batch: Sequence[RunRequest]) -> float:
        return compute_s(self._costs, batch, growth=self._rules.growth_tokens)

    def _num_tokens(self, request: RunRequest, step_s: float) -> float:
        """Return the tokens that a request gets within the turn."""
        return max(0.0, self._rules.turn_s - way_back_s(self._snapshot, request)) / step_s

    def _usable(self, batch: Sequence[RunRequest], step_s: float) -> float:
        members = {request.request_id for request in batch}
        others = (r for r in self._snapshot.requests if r.request_id not in members)
        num_used = sum(
            min(self._num_tokens(request, step_s), self._needed(request)) for request in batch
        )
        return (num_used - sum(map(self._lacked, others))) / self._rules.turn_s

    def _needed(self, request: RunRequest) -> float:
        """Return the tokens that a reader uses up within the turn and does not have yet."""
        if not request.rate_tps:
            return math.inf
        return request.rate_tps * max(0.0, self._rules.turn_s - request.spare_s)

    def _lacked(self, request: RunRequest) -> float:
        """Return the tokens that a reader who is left out lacks before he could be back."""
        if not request.has_begun or not request.rate_tps:
            return 0.0
        short_s = self._rules.due_s + way_back_s(self._snapshot, request) - request.spare_s
        return request.rate_tps * min(self._rules.turn_s, max(0.0, short_s))


def way_back_s(snapshot: RunSnapshot, request: RunRequest) -> float:
    """Return how long a request is on its way before it runs."""
    if request.phase is not RunPhase.PARKED:
        return 0.0
    return snapshot.h2d_queue_s + snapshot.load_s(request)


class Candidates:
    """The sets to rate. `batch`: who runs or is on its way, the oldest first."""

    def __init__(self, snapshot: RunSnapshot, rules: JointRules = DEFAULT_RULES) -> None:
        self._snapshot, self._rules = snapshot, rules
        self._room = Room(snapshot, growth=NEXT_TOKENS)
        here = (RunPhase.RUNNING, RunPhase.RETURNING)
        in_batch = [r for r in snapshot.requests if r.phase in here]
        self._batch = sorted(in_batch, key=lambda r: -r.arrival_age_s)
        self._queue = [r for r in snapshot.requests if r.phase not in here]
        self._members = [r for r in snapshot.requests if r.phase is not RunPhase.NEW]

    def plain(self) -> list[RunRequest]:
        """Return whom vLLM lets run: all but the newest that lack room, then the queue in order."""
        batch = self._shrunk(self._batch)
        if len(batch) < len(self._batch):
            return batch
        for request in self._queue:
            if batch and not self._room.fits([*batch, request]):
                break
            batch.append(request)
        return batch

    def _shrunk(self, stays: Sequence[RunRequest]) -> list[RunRequest]:
        """Return who is left when the newest have made room for the next token of the others."""
        batch = list(stays)
        running = [request for request in batch if request.runs]
        while len(batch) > 1 and running and not self._room.fits(batch):
            batch.remove(running.pop())
        return batch

    def others(self, rating: Rating) -> Iterator[list[RunRequest]]:
        """Yield what could run instead; some may be plain residency again, or empty."""
        for held in self._held_back():
            yield from self._without(held, rating)

    def _held_back(self) -> Iterator[Sequence[RunRequest]]:
        """Yield who gives up a turn: nobody, then ever more of those with most in hand."""
        yield ()
        is_crowded = bool(self._queue) or not self._room.fits(self._batch)
        if not is_crowded or not can_take_turns(self._snapshot, self._members):
            return
        able = sorted(filter(self._may_leave, self._batch), key=lambda r: -r.spare_s)
        for number in range(1, min(len(able), self._rules.most_held) + 1):
            yield able[:number]

    def _may_leave(self, request: RunRequest) -> bool:
        snapshot, rules = self._snapshot, self._rules
        least_s = rules.least_s + snapshot.h2d_queue_s + 2.0 * snapshot.load_s(request)
        return (
            request.runs
            and request.run_age_s > rules.period_s
            and request.spare_s >= least_s
            and snapshot.is_saved(request, unsaved_blocks=rules.unsaved_blocks)
        )

    def _without(self, held: Sequence[RunRequest], rating: Rating) -> Iterator[list[RunRequest]]:
        """Yield the sets that leave some out: what fits the pool, then more of the line."""
        stays = [request for request in self._batch if request not in held]
        batch = self._shrunk(stays)
        if len(batch) < len(stays):
            yield batch
            if rating.is_in_time(stays):
                yield stays
            return
        for request in self._line():
            grown = [*batch, request]
            if not self._may_come(request, batch):
                break
            if not self._room.fits(grown):
                yield batch
                if not rating.is_in_time(grown):
                    return
            batch = grown
        yield batch

    def _line(self) -> list[RunRequest]:
        """Return the queue as it is let in: who is due to come back, newcomers, other parked."""

        def early_s(request: RunRequest) -> float:
            if request.phase is RunPhase.NEW:
                return 0.0
            return request.spare_s - way_back_s(self._snapshot, request) - self._rules.due_s

        return sorted(self._queue, key=early_s)

    def _may_come(self, request: RunRequest, batch: Sequence[RunRequest]) -> bool:
        """Return whether nobody who has begun is left out for a newcomer who is not promised."""
        if request.phase is not RunPhase.NEW or all(one in batch for one in self._members):
            return True
        newcomers = [one for one in batch if one.phase is RunPhase.NEW]
        return can_promise(self._snapshot, [*self._members, *newcomers, request])
