"""`evenflow`: do what vLLM would; do more only where a measured cost says no reader pays for it.

More is one of three things: a step with layers on the host, which hides behind compute; a reader
parked that has tokens in hand; a prompt in pieces, as long as the step has time left. The rules, in
their order (`decide` reads like this list):

1. outgrown   the batch exceeds the pool: layers leave if no reader pays for it, else a request does
2. due        parked readers that will lack a token soon come back, and may send others away
3. new        in the order in which first tokens are due: requests that run well beside all
              members, or whose reading the pool can promise; for the latter readers with enough in
              hand make room, for two prompts at a time
4. room left  parked ones by what they have in hand, if they fit for a while
5. chunk      prompts get what the step has left before the next token is due anywhere, unless
              the pool holds few requests

A request whose reader states no rate, or that thinks, has nothing in hand and needs its blocks
always: with such requests only, rules 2 to 5 are vLLM's first come first served. So they are where
the host has no room for copies of all: no layer leaves, no request takes turns, and one
that must be computed anew comes back once it can stay for a while.

Words, here and in `promise`:

    in hand     what a reader has not read yet, in seconds of reading; `spare_s`
    due         what is in hand ends before the request could be back in the pool
    sure        one of the oldest requests whose reading the pool sustains; others stand by
    turns       requests take turns where the pool holds several, and the host keeps all
    keeps       the host has room for copies of all requests, answers to come included
    promised    the pool sustains the reading of all, if they take turns
    loss        tokens per second that the batch generates less than without a request
"""

import math
from collections.abc import Callable, Iterable, Sequence

from services.placement.run.evenflow_rules import DEFAULT_RULES, EvenflowRules
from services.placement.run.larger_than_pool import decide_beside
from services.placement.run.newcomers import in_line
from services.placement.run.priorities import decide_by_priority
from services.placement.run.promise import LEAST_TURN_S, Promise, can_take_turns, sure_ones
from services.placement.run.prompts import are_hidden, chunk_tokens, prompts_s
from services.placement.run.reason import Reason
from services.placement.run.step_estimate import Steps, compute_s, longest_s, most_tokens_in
from services.placement.run.types import (
    IDLE,
    RunDecision,
    RunPhase,
    RunRequest,
    RunSnapshot,
    StepCosts,
)
from services.placement.types import RequestId

NO_SPARE = math.inf
NEXT_TOKENS = 1  # that all that run must have room for: none leaves earlier than it must
AHEAD_TOKENS = 2  # that all have room for beside a request that joins
MOST_TRIES = 4  # of parked ones that do not fit into room that is left
LEAST_FREED_ROWS = 2  # blocks per layer group that a victim must have for itself
JUDGED_TOKENS = 4  # by which a batch that outgrows the pool is judged


def decide(snapshot: RunSnapshot, rules: EvenflowRules = DEFAULT_RULES) -> RunDecision:
    """Return which requests run, are parked and come in, and how long pieces of prompts are."""
    if not snapshot.requests:
        return IDLE
    num_blocks = snapshot.engine.num_blocks
    blocks = snapshot.blocks(growth=AHEAD_TOKENS)
    large = [r for r in snapshot.requests if blocks[r.request_id] > num_blocks]
    if not large:
        return _decide_by_priority(snapshot, rules)
    return decide_beside(large, snapshot, rules, lambda others: _decide_by_priority(others, rules))


def _decide_by_priority(snapshot: RunSnapshot, rules: EvenflowRules) -> RunDecision:
    return decide_by_priority(snapshot, rules, lambda urgent: _decide(urgent, rules))


def _decide(snapshot: RunSnapshot, rules: EvenflowRules) -> RunDecision:
    draft = _Draft(snapshot, rules)
    draft.shrink_outgrown()
    is_blocked = not draft.bring_back_due()
    if not is_blocked:
        draft.admit_new()
    draft.fill_room()
    return draft.decision(is_blocked=is_blocked)


class _Draft:
    """A decision in the making. `batch`: what runs or is on its way."""

    def __init__(self, snapshot: RunSnapshot, rules: EvenflowRules) -> None:
        self._snapshot, self._rules = snapshot, rules
        self._num_pool_blocks = snapshot.engine.num_blocks
        self._steps, self._promise = Steps(snapshot), Promise(snapshot)
        requests = snapshot.requests
        self.batch = [r for r in requests if r.phase in (RunPhase.RUNNING, RunPhase.RETURNING)]
        self._parked = [r for r in requests if r.phase is RunPhase.PARKED]
        self._new = in_line(
            [r for r in requests if r.phase is RunPhase.NEW], ahead_s=snapshot.ahead_s
        )
        self._parks: list[RunRequest] = []
        self._comes: list[RunRequest] = []
        self._reasons: dict[RunRequest, Reason] = {}  # of those that the rules name
        members = [*self.batch, *self._parked]
        self._sure = sure_ones(snapshot, members)
        self._keeps = self._promise.keeps(members)
        self._takes_turns = self._keeps and can_take_turns(snapshot, members)
        self._victims = sorted(filter(self._may_leave, self.batch), key=self._need)
        self._back = sorted(self._parked, key=self._need)

    # -- what holds of a request -------------------------------------------------------------

    def _is_sure(self, request: RunRequest) -> bool:
        return request.request_id in self._sure

    def _may_leave(self, request: RunRequest) -> bool:
        rests = request.run_age_s > self._rules.period_s and request.has_begun
        paced = bool(request.rate_tps) or not self._is_sure(request)
        return request.runs and rests and paced and self._saved(request)

    def _saved(self, request: RunRequest) -> bool:
        return self._snapshot.is_saved(request, unsaved_blocks=self._rules.unsaved_blocks)

    def _need(self, request: RunRequest) -> tuple[bool, float, float]:
        """Order by need of the pool: sure ones by what they have in hand, then the others by what
        their ids have attained, and by age.

        The first comes back first, the last leaves first.
        """
        if self._is_sure(request):
            return False, 0.0, request.spare_s
        return True, request.attained, -request.arrival_age_s

    # -- what holds of a batch ---------------------------------------------------------------

    def _fits(self, batch: Iterable[RunRequest], *, growth: int = AHEAD_TOKENS) -> bool:
        return self._snapshot.num_blocks_of(batch, growth=growth) <= self._num_pool_blocks

    def _stays(self, request: RunRequest) -> bool:
        """Return whether a request may come back for a while, all layers in the pool."""
        return self._fits([*self.batch, request], growth=self._rules.growth_tokens)

    def _limit_s(self, costs: StepCosts, batch: Sequence[RunRequest], frac: float) -> float:
        """Return how long a step may take so that no request is served slower than it is read."""
        unpaced_s = self._rules.hide_frac * compute_s(costs, batch)
        return longest_s(batch, paced_frac=frac, unpaced_s=unpaced_s)

    def _pays(
        self, batch: Sequence[RunRequest], rest: Sequence[RunRequest], *, growth: int
    ) -> bool:
        """Return whether the batch generates no slower than what of it is left as `rest`."""
        if not rest:
            return True
        with_s = self._steps.decode_s(batch, growth=growth)
        without_s = self._steps.decode_s(rest, growth=growth)
        return _step_tokens(batch) * without_s >= _step_tokens(rest) * with_s

    def _runs_well(self, batch: Sequence[RunRequest], last: RunRequest) -> bool:
        """Return whether `last` may join: as vLLM admits, or with layers away at no loss."""
        if len(batch) > self._snapshot.engine.max_num_seqs:
            return False
        if self._fits(batch):
            return True
        costs, growth = self._snapshot.costs, self._rules.growth_tokens
        if costs is None or not self._promise.keeps(batch):
            return False
        limit_s = self._limit_s(costs, batch, self._rules.tight_frac)
        rest = _without(batch, last)
        if last.prefixes:  # joining those that wait for a prefix of its own adds little to that
            limit_s = max(limit_s, self._steps.decode_s(rest, growth=growth) if rest else 0.0)
        if self._steps.decode_s(batch, growth=growth, limit_s=limit_s) > limit_s:
            return False
        return all(self._pays(batch, rest, growth=n) for n in (JUDGED_TOKENS, growth))

    # -- the rules -----------------------------------------------------------------------------

    def shrink_outgrown(self) -> None:
        """While the batch exceeds the pool: layers leave if none pays for it, else a request."""
        while len(self.batch) > 1 and not self._fits(self.batch, growth=NEXT_TOKENS):
            victim = self._least_needed(self.batch)
            if victim is None or self._hides(victim):
                return
            self.batch.remove(victim)
            self._parks.append(victim)
            self._reasons[victim] = Reason.OUTGROWN

    def _least_needed(self, batch: Sequence[RunRequest]) -> RunRequest | None:
        """Return the newest stand-by or what has most in hand; with nothing to spare the newest.

        Newest: of the id that has attained most.
        """
        running = [request for request in batch if request.runs]
        stand_by = [request for request in running if not self._is_sure(request)]
        if stand_by:
            return min(reversed(stand_by), key=_last_served)
        readers = [r for r in running if r.has_begun and r.rate_tps and self._saved(r)]
        most = max(readers, key=lambda r: r.spare_s, default=None)
        if (
            self._takes_turns
            and most is not None
            and most.spare_s > self._rules.due_s + self._snapshot.way_back_s(most)
        ):
            return most
        return min(reversed(running), key=_last_served, default=None)

    def _hides(self, victim: RunRequest) -> bool:
        """Return whether the batch runs on as it is, with layers on the host, at no loss."""
        costs = self._snapshot.costs
        if costs is None or not self._promise.keeps(self.batch):
            return False
        # Where a long part gives layers up for many short ones, one victim alone changes nothing.
        for rest in (_without(self.batch, victim), self._fitting(self.batch)):
            if not self._pays(self.batch, rest, growth=JUDGED_TOKENS):
                return False
        step_s = self._steps.decode_s(self.batch, growth=JUDGED_TOKENS)
        readers = [r.spare_s for r in self.batch if r.has_begun and r.rate_tps]
        nobody_short = min(readers, default=math.inf) > self._rules.due_s
        return step_s <= self._limit_s(costs, self.batch, 1.0) or (
            nobody_short and step_s < math.inf
        )

    def _fitting(self, batch: Sequence[RunRequest]) -> Sequence[RunRequest]:
        """Return what is left of a batch once those have left that the pool has no room for."""
        while len(batch) > 1 and not self._fits(batch, growth=JUDGED_TOKENS):
            victim = self._least_needed(batch)
            if victim is None:
                break
            batch = _without(batch, victim)
        return batch

    def bring_back_due(self) -> bool:
        """Let parked ones come back that are due; return False if one could not: none new."""
        rules = self._rules
        for request in self._back:
            if not self._keeps and self.batch and not self._stays(request):
                return False  # else what is computed anew is soon lost again
            ready_s = rules.period_s + self._snapshot.way_back_s(request)
            takes_turns = self._takes_turns and self._is_sure(request)
            if takes_turns and request.spare_s >= rules.due_s + ready_s:
                self._reasons[request] = Reason.IN_HAND
                continue
            floor_s = max(request.spare_s, ready_s) + rules.margin_s if takes_turns else NO_SPARE
            if not self._make_room(request, self._above(floor_s)):
                return False
            self._come(request, Reason.DUE)
        return True

    def _come(self, request: RunRequest, reason: Reason) -> None:
        self._comes.append(request)
        self._reasons[request] = reason

    def _above(self, floor_s: float, *, num_loads: int = 1) -> Callable[[RunRequest], float]:
        """Return what a victim must have in hand: the floor, and so many times its way back."""
        return lambda victim: floor_s + num_loads * self._snapshot.load_s(victim)

    def admit_new(self) -> None:
        """Admit the queue in its order, until one must wait."""
        rules = self._rules
        there = set(self.batch)
        waiting = [request for request in self._parked if request not in there]
        members = [*self.batch, *waiting, *self._parks]
        for request in self._new:
            prompts = [r for r in (*self.batch, request) if self._snapshot.is_prompt(r)]
            if self._fits([*members, request]) or (
                are_hidden(self._snapshot, self.batch, prompts)
                and self._runs_well([*members, request], request)
            ):
                reason = Reason.FITS
                comes = self._make_room(request, self._above(NO_SPARE))
            elif self._takes_turns and self._promises(request, members):
                if len(prompts) > rules.most_prompts:
                    self._reasons[request] = Reason.PROMPTS
                    return
                reason, floor_s = Reason.PROMISED, self._floor_s(prompts)
                comes = self._make_room(request, self._above(floor_s, num_loads=2))
            else:
                reason, comes = Reason.ALONE, not self.batch
                self.batch += [request] if comes else []
            if not comes:
                self._reasons[request] = Reason.NO_ROOM
                return
            self._come(request, reason)
            members.append(request)

    def _promises(self, request: RunRequest, members: Sequence[RunRequest]) -> bool:
        """Return whether the pool sustains all members' reading and a newcomer's.

        One without a TTFT SLO leaves room for those with one, as the newest of them there: as many
        as readers make room for at a time.
        """
        people = list[RunRequest]()
        if request.slo_ttft_s is None:
            stated = [one for one in members if one.slo_ttft_s is not None]
            people = stated[-self._rules.most_prompts :]
        return self._promise.holds([*members, request, *people])

    def _floor_s(self, prompts: Sequence[RunRequest]) -> float:
        """Return what a reader that makes room for newcomers has in hand, beside its ways.

        Their prompts are computed meanwhile, and the link must carry all ways back.
        """
        least_s = LEAST_TURN_S + prompts_s(self._snapshot, prompts)
        return max(least_s, self._promise.turn_s) + self._snapshot.h2d_queue_s

    def _make_room(self, request: RunRequest, floor_s: Callable[[RunRequest], float]) -> bool:
        """Take a request into the batch, in place of those with most in hand; or change nothing.

        `floor_s`: what a sure one must have in hand to be parked. Stand-by ones leave for sure ones
        only.
        """
        rest, gone = list(self.batch), list[RunRequest]()
        there = set(rest)
        free = [victim for victim in self._victims if victim in there]
        while not self._runs_well([*rest, request], request):
            if not free:
                return False
            victim = free.pop()
            if victim.prefixes and free and not self._frees(rest, victim):
                continue
            if self._is_sure(victim):
                stays = victim.spare_s < floor_s(victim)
            else:
                stays = not self._is_sure(request)
            if stays:
                return False
            rest.remove(victim)
            gone.append(victim)
        self.batch = [*rest, request]
        self._parks += gone
        self._reasons.update(dict.fromkeys(gone, Reason.GAVE_PLACE))
        return True

    def _frees(self, batch: Sequence[RunRequest], victim: RunRequest) -> bool:
        """Return whether the pool gains by a victim that shares most of what it has."""
        num_blocks = self._snapshot.num_blocks_of(batch, growth=AHEAD_TOKENS)
        num_left = self._snapshot.num_blocks_of(_without(batch, victim), growth=AHEAD_TOKENS)
        return num_blocks - num_left > LEAST_FREED_ROWS * self._snapshot.engine.num_groups

    def fill_room(self) -> None:
        """Let parked ones come into room that is left, if it stays for a while."""
        num_tries = MOST_TRIES
        for request in self._back:
            batch = [*self.batch, request]
            if request in self.batch or not num_tries:
                continue
            if not self._runs_well(batch, request):
                num_tries -= 1
                continue
            if self._stays(request) or not self._fits(batch) or not self.batch:
                self.batch = batch
                self._come(request, Reason.BACK)

    def decision(self, *, is_blocked: bool) -> RunDecision:
        """Return what has come out."""
        gone = frozenset(request.request_id for request in self._parks)
        comes = [r for r in self._comes if r.request_id not in gone]
        came = set(self._comes)
        stays = [r for r in self.batch if r not in came]
        has_prompts = any(map(self._snapshot.is_prompt, self.batch))
        costs = self._snapshot.costs
        step_s = compute_s(costs, self.batch) if costs and self.batch else self._rules.period_s
        num_ahead = most_tokens_in(self._rules.period_s, self.batch, step_s=step_s) + AHEAD_TOKENS
        is_full = not self._fits(self.batch, growth=num_ahead)
        is_busy = has_prompts or is_full or bool(self._comes or self._parks)
        wait_s = self._rules.blocked_s if is_blocked else self._rules.period_s
        run: tuple[RequestId, ...] = tuple(request.request_id for request in (*stays, *comes))
        return RunDecision(
            run=run,
            park=gone,
            chunk_tokens=chunk_tokens(
                self._snapshot,
                self.batch,
                self._steps,
                self._rules,
                is_waited_for=any(request not in came for request in self._new),
            ),
            offloads=not self._fits(self.batch, growth=NEXT_TOKENS),
            valid_for_s=0.0 if is_busy else wait_s,
            reasons=self._all_reasons(),
        )

    def _all_reasons(self) -> dict[RequestId, Reason]:
        """Return each request's: what the rules say, else what its place says."""
        reasons = {r.request_id: Reason.BEHIND for r in self._new}
        reasons |= {r.request_id: Reason.NO_ROOM for r in self._parked}
        reasons |= {r.request_id: Reason.STAYS for r in self.batch}
        return reasons | {r.request_id: reason for r, reason in self._reasons.items()}


def _last_served(request: RunRequest) -> tuple[float, float]:
    """Order by what ids have attained, most first, and by age, the newest first."""
    return -request.attained, request.arrival_age_s


def _step_tokens(batch: Sequence[RunRequest]) -> float:
    """Return how many tokens a decode step of a batch brings."""
    return sum([request.tokens_per_step for request in batch])


def _without(batch: Sequence[RunRequest], request: RunRequest) -> list[RunRequest]:
    return [one for one in batch if one is not request]
