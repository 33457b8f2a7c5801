"""`joint`: of some sets that could run, the one that serves its readers best, by prediction.

The candidates are plain first come first served residency, always; and for each number of readers
held back, those with most in hand first, what could come in their place: whole requests in the
pool, then more with layers on the host for as long as no reader gets tokens slower than its rate.
Where the layers of what runs live is the optimiser's to say, and its formula predicts the step.

A set is rated by the tokens per second that readers can use: what each needs within a turn beyond
what it has in hand, less what readers that are left out lack before they could be back. The best is
taken where it is above plain residency and generates practically as much: never what is worse.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.placement.run.promise import Promise, can_take_turns
from services.placement.run.step_estimate import Steps, compute_s, longest_s, most_tokens_in
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
    hide_frac: float = 1.05  # of its compute that a step takes at most without a stated rate
    growth_tokens: int = 48  # by which all have grown when a set that a request joins is judged
    stay_tokens: int = 4  # the same, of a set that runs already
    due_s: float = 1.0  # in hand, at which a reader must be on its way back
    least_s: float = 2.0  # in hand, beyond twice its way back, of a reader that is held back
    most_held: int = 4  # in one decision
    period_s: float = 0.25  # between decisions; shortest turn
    unsaved_blocks: int = 3  # of the newest of a held back request that need no copy yet


DEFAULT_RULES = JointRules()
NEXT_TOKENS = 1  # that every request that runs must have room for


def decide(snapshot: RunSnapshot, rules: JointRules = DEFAULT_RULES) -> RunDecision:
    """Return the best candidate, as what runs and what leaves."""
    if not snapshot.requests:
        return IDLE
    batch = best(snapshot, rules)
    runs = {request.request_id for request in batch}
    park = frozenset(r.request_id for r in snapshot.requests if r.runs and r.request_id not in runs)
    costs = snapshot.costs
    step_s = compute_s(costs, batch) if costs else rules.period_s
    num_ahead = most_tokens_in(rules.period_s, batch, step_s=step_s) + NEXT_TOKENS
    stays = not park and all(request.runs for request in batch)
    is_calm = stays and fits(snapshot, batch, growth=num_ahead)
    return RunDecision(
        run=tuple(request.request_id for request in batch),
        park=park,
        offloads=not fits(snapshot, batch),
        valid_for_s=rules.period_s if is_calm else 0.0,
    )


def fits(snapshot: RunSnapshot, batch: Sequence[RunRequest], *, growth: int = NEXT_TOKENS) -> bool:
    """Return whether the pool holds a set with all layers."""
    blocks = snapshot.blocks(growth=growth)
    num_blocks = sum([blocks[request.request_id] for request in batch])
    return num_blocks <= snapshot.engine.num_blocks


def best(snapshot: RunSnapshot, rules: JointRules = DEFAULT_RULES) -> list[RunRequest]:
    """Return the candidate of the highest rate; plain residency where nothing is measured."""
    candidates = Candidates(snapshot, rules)
    chosen = candidates.plain()
    if snapshot.costs is None or len(chosen) == len(snapshot.requests):
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
        self._brings: dict[RequestId, float] = {}  # tokens x seconds per step, if it is let in
        self._needs: dict[RequestId, float] = {}  # tokens of the turn that it does not have yet
        self._lacks: dict[RequestId, float] = {}  # tokens, if it is left out
        for request in snapshot.requests:
            is_parked, name = request.phase is RunPhase.PARKED, request.request_id
            back_s = snapshot.way_back_s(request) if is_parked else 0.0
            self._brings[name] = max(0.0, rules.turn_s - back_s) * request.tokens_per_step
            self._needs[name], self._lacks[name] = math.inf, 0.0
            if request.rate_tps:
                needed_s = max(0.0, rules.turn_s - request.spare_s)
                self._needs[name] = request.rate_tps * needed_s
            if request.rate_tps and request.has_begun:
                short_s = min(rules.turn_s, max(0.0, rules.due_s + back_s - request.spare_s))
                self._lacks[name] = request.rate_tps * short_s
        self._num_lacked = sum(self._lacks.values())
        self._steps = Steps(snapshot)

    def usable(self, batch: Sequence[RunRequest]) -> float:
        """Return what the readers of a set can use of it, less what the others lack."""
        return self._usable(batch, self.step_s(batch))

    def bound(self, batch: Sequence[RunRequest]) -> float:
        """Return what they could use if no step waited for a copy: no placement gives more."""
        return self._usable(batch, self._compute_s(batch))

    def generated(self, batch: Sequence[RunRequest]) -> float:
        """Return what a set generates, used or not."""
        brings = sum(self._brings[request.request_id] for request in batch)
        return brings / self.step_s(batch) / self._rules.turn_s

    def step_s(self, batch: Sequence[RunRequest], *, limit_s: float = math.inf) -> float:
        """Return the predicted step, when all have grown; beyond the limit any longer one."""
        if fits(self._snapshot, batch):
            return self._compute_s(batch)
        return self._steps.decode_s(batch, growth=self._growth(batch), limit_s=limit_s)

    def is_in_time(self, batch: Sequence[RunRequest]) -> bool:
        """Return whether all have a seat and no reader would get tokens slower than its rate."""
        if len(batch) > self._snapshot.engine.max_num_seqs:
            return False
        unpaced_s = self._rules.hide_frac * self._compute_s(batch)
        limit_s = longest_s(batch, paced_frac=self._rules.tight_frac, unpaced_s=unpaced_s)
        return self.step_s(batch, limit_s=limit_s) <= limit_s

    def _compute_s(self, batch: Sequence[RunRequest]) -> float:
        return compute_s(self._costs, batch, growth=self._growth(batch))

    def _growth(self, batch: Sequence[RunRequest]) -> int:
        runs = all(request.runs for request in batch)
        return self._rules.stay_tokens if runs else self._rules.growth_tokens

    def _usable(self, batch: Sequence[RunRequest], step_s: float) -> float:
        num_tokens = -self._num_lacked
        for request in batch:
            name = request.request_id
            num_tokens += min(self._brings[name] / step_s, self._needs[name]) + self._lacks[name]
        return num_tokens / self._rules.turn_s


class Candidates:
    """The sets to rate. `batch`: what runs or is on its way, the oldest first."""

    def __init__(self, snapshot: RunSnapshot, rules: JointRules = DEFAULT_RULES) -> None:
        self._snapshot, self._rules = snapshot, rules
        here = (RunPhase.RUNNING, RunPhase.RETURNING)
        in_batch = [r for r in snapshot.requests if r.phase in here]
        self._batch = sorted(in_batch, key=lambda r: -r.arrival_age_s)
        self._queue = [r for r in snapshot.requests if r.phase not in here]
        self._members = [r for r in snapshot.requests if r.phase is not RunPhase.NEW]
        self._new = [r for r in snapshot.requests if r.phase is RunPhase.NEW]
        self._needs = snapshot.blocks(growth=NEXT_TOKENS)
        self._promise = Promise(snapshot)
        self._promised: list[bool] = []  # whether the pool can promise so many newcomers, and one

    def _num_blocks(self, batch: Sequence[RunRequest]) -> int:
        return sum(self._needs[request.request_id] for request in batch)

    def _has_room(self, num_requests: int, num_blocks: int) -> bool:
        engine = self._snapshot.engine
        return num_blocks <= engine.num_blocks and num_requests <= engine.max_num_seqs

    def plain(self) -> list[RunRequest]:
        """Return what vLLM lets run: all but the newest that lack room, then the queue in order."""
        batch = self._shrunk(self._batch)
        if len(batch) < len(self._batch):
            return batch
        num_blocks = self._num_blocks(batch)
        for request in self._queue:
            num_blocks += self._needs[request.request_id]
            if batch and not self._has_room(len(batch) + 1, num_blocks):
                break
            batch.append(request)
        return batch

    def _shrunk(self, stays: Sequence[RunRequest]) -> list[RunRequest]:
        """Return what is left when the newest have made room for the next token of the others."""
        batch = list(stays)
        running = [request for request in batch if request.runs]
        num_blocks = self._num_blocks(batch)
        while len(batch) > 1 and running and not self._has_room(len(batch), num_blocks):
            newest = running.pop()
            batch.remove(newest)
            num_blocks -= self._needs[newest.request_id]
        return batch

    def others(self, rating: Rating) -> Iterator[list[RunRequest]]:
        """Yield what could run instead; some may be plain residency again, or empty."""
        for held in self._held_back():
            yield from self._without(held, rating)

    def _held_back(self) -> Iterator[Sequence[RunRequest]]:
        """Yield which requests give up a turn: none, then ever more of those with most in hand."""
        yield ()
        is_crowded = bool(self._queue) or not fits(self._snapshot, self._batch)
        if not is_crowded or not can_take_turns(self._snapshot, self._members):
            return
        if not self._promise.keeps(self._members):
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
        num_blocks, num_new = self._num_blocks(batch), 0
        num_left_out = len(self._members) - len(batch)
        for request in self._line():
            if request.phase is not RunPhase.NEW:
                num_left_out -= 1
            elif num_left_out and not self._can_promise(num_new):
                break
            else:
                num_new += 1
            grown = [*batch, request]
            num_blocks += self._needs[request.request_id]
            if not self._has_room(len(grown), num_blocks):
                yield batch
                if not rating.is_in_time(grown):
                    return
            batch = grown
        yield batch

    def _line(self) -> list[RunRequest]:
        """Return the queue as it is let in: those due to come back, newcomers, other parked."""

        def early_s(request: RunRequest) -> float:
            if request.phase is RunPhase.NEW:
                return 0.0
            return request.spare_s - self._snapshot.way_back_s(request) - self._rules.due_s

        return sorted(self._queue, key=early_s)

    def _can_promise(self, num_new: int) -> bool:
        """Return whether the pool sustains the reading of all members, so many new ones and one."""
        while len(self._promised) <= num_new:
            newcomers = self._new[: len(self._promised) + 1]
            self._promised.append(self._promise.holds([*self._members, *newcomers]))
        return self._promised[num_new]
