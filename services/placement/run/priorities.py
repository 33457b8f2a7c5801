"""Requests of several priorities: the most urgent are decided as if alone, the others get the rest.

Priority is vLLM's: lower is more urgent. Where all are alike, nothing here decides anything.

1. pinned     a less urgent request keeps its place until its copy on the host is complete, so that
              what it gives up is loaded, not computed anew; unless the urgent outgrow the pool
2. urgent     those of the most urgent priority are decided by the policy, in a pool without what
              is pinned: no other request counts among its members
3. the rest   by priority: what runs stays while there is room, else is parked, the newest first;
              parked ones come back, then newcomers come in, while all fit for a while, until one
              must wait: none comes in while a more urgent one waits for room
4. raised     the request that has waited longest, if for `raised_after_s`, is as urgent as any,
              until it has run for `raised_turn_s`: so each makes progress. One at a time, and none
              whose reader has more than that in hand
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from services.placement.run.evenflow_rules import EvenflowRules
from services.placement.run.newcomers import in_line
from services.placement.run.promise import Promise
from services.placement.run.prompts import chunk_tokens
from services.placement.run.reason import Reason
from services.placement.run.step_estimate import Steps
from services.placement.run.types import RunDecision, RunPhase, RunRequest, RunSnapshot

NEXT_TOKENS = 1  # that all that run must have room for
AHEAD_TOKENS = 2  # that all have room for beside a request that joins

Decide = Callable[[RunSnapshot], RunDecision]


def decide_by_priority(snapshot: RunSnapshot, rules: EvenflowRules, decide: Decide) -> RunDecision:
    """Return `decide` of requests of one priority; of several, of the urgent with the rest beside.

    No request alone exceeds the pool.
    """
    if len({request.priority for request in snapshot.requests}) < 2:
        return decide(snapshot)
    most_urgent = min(request.priority for request in snapshot.requests)
    raised = _raised(snapshot, rules, most_urgent)
    urgent = [r for r in snapshot.requests if r is raised or r.priority == most_urgent]
    draft = _Rest(snapshot, rules, urgent)
    draft.take_urgent(decide)
    draft.take_rest()
    return draft.decision()


def _raised(snapshot: RunSnapshot, rules: EvenflowRules, most_urgent: int) -> RunRequest | None:
    """Return the less urgent request whose turn it is: one that has begun it, else the next."""
    late = [
        r
        for r in snapshot.requests
        if r.priority > most_urgent
        and r.waited_s >= rules.raised_after_s
        and (r.runs or r.spare_s < rules.raised_turn_s)
        and (not r.runs or r.run_age_s < rules.raised_turn_s or r.run_age_s == math.inf)
    ]
    here = (RunPhase.RUNNING, RunPhase.RETURNING)
    return max(late, key=lambda r: (r.runs, r.phase in here, r.waited_s), default=None)


class _Rest:
    """A decision in the making. `_batch`: what runs or is on its way."""

    def __init__(
        self, snapshot: RunSnapshot, rules: EvenflowRules, urgent: Sequence[RunRequest]
    ) -> None:
        self._snapshot, self._rules, self._urgent = snapshot, rules, urgent
        are_urgent = set(urgent)
        self._others = sorted(
            (r for r in snapshot.requests if r not in are_urgent),
            key=lambda r: (r.priority, r.attained, -r.arrival_age_s),
        )
        members = [r for r in snapshot.requests if r.phase is not RunPhase.NEW]
        self._keeps = Promise(snapshot).keeps(members)
        self._pinned = self._pins()
        self._batch: list[RunRequest] = []
        self._reasons: dict[RunRequest, Reason] = {}
        self._first = RunDecision(run=())
        self._has_changed = False
        self._is_blocked = False  # a request waits for room: none that is less urgent comes in

    # -- what holds ----------------------------------------------------------------------------

    def _fits(self, batch: Sequence[RunRequest], *, growth: int) -> bool:
        engine = self._snapshot.engine
        num_blocks = self._snapshot.num_blocks_of(batch, growth=growth)
        return num_blocks <= engine.num_blocks and len(batch) <= engine.max_num_seqs

    def _yields(self, request: RunRequest) -> bool:
        """Return whether all full blocks that a request has are on the host, and stay there."""
        num_unsaved = request.num_computed_tokens - request.num_host_tokens
        is_saved = num_unsaved < self._snapshot.engine.block_size  # each full block
        rests = self._rules.period_s < request.run_age_s < math.inf
        return request.runs and rests and is_saved and self._keeps

    def _pins(self) -> list[RunRequest]:
        """Return the less urgent that keep their places now: as many as the urgent leave room."""
        pinned = [r for r in self._others if _is_here(r) and not self._yields(r)]
        here = [r for r in self._urgent if _is_here(r)]
        while not self._fits([*here, *pinned], growth=NEXT_TOKENS):
            victim = next((r for r in reversed(pinned) if r.runs), None)
            if victim is None:
                break
            pinned.remove(victim)
        return pinned

    # -- the rules -----------------------------------------------------------------------------

    def take_urgent(self, decide: Decide) -> None:
        """Decide the most urgent in a pool without what is pinned."""
        snapshot, engine = self._snapshot, self._snapshot.engine
        blocks = snapshot.blocks(growth=AHEAD_TOKENS)
        num_pinned = snapshot.num_blocks_of(self._pinned, growth=AHEAD_TOKENS)
        shape = replace(
            engine,
            num_blocks=engine.num_blocks - num_pinned,
            max_num_seqs=engine.max_num_seqs - len(self._pinned),
        )
        could = [
            r
            for r in self._urgent
            if _is_here(r) or (blocks[r.request_id] <= shape.num_blocks and shape.max_num_seqs > 0)
        ]
        if could:
            self._first = decide(replace(snapshot, requests=tuple(could), engine=shape))
        runs = set(self._first.run)
        self._batch = [r for r in self._urgent if r.request_id in runs] + self._pinned
        self._is_blocked = any(map(self._waits_for_room, self._urgent))

    def _waits_for_room(self, request: RunRequest) -> bool:
        name = request.request_id
        is_away = request.phase in (RunPhase.NEW, RunPhase.PARKED)
        in_hand = self._first.reasons.get(name) is Reason.IN_HAND
        return is_away and name not in self._first.run and not in_hand

    def take_rest(self) -> None:
        """Let the others stay, come back and come in, as far as there is room."""
        pinned = set(self._pinned)
        for priority in sorted({request.priority for request in self._others}):
            alike = [r for r in self._others if r.priority == priority and r not in pinned]
            for request in alike:
                if request.runs:
                    self._stay(request)
            parked = [r for r in alike if r.phase is RunPhase.PARKED]
            new = in_line(
                (r for r in alike if r.phase is RunPhase.NEW), ahead_s=self._snapshot.ahead_s
            )
            for request in (*parked, *new):
                self._come(request)

    def _stay(self, request: RunRequest) -> None:
        if self._fits([*self._batch, request], growth=NEXT_TOKENS):
            self._batch.append(request)
        else:
            self._reasons[request] = Reason.YIELDED
            self._has_changed = True

    def _come(self, request: RunRequest) -> None:
        growth = self._rules.growth_tokens
        batch = [*self._batch, request]
        if self._is_blocked:
            self._reasons[request] = Reason.LESS_URGENT
        elif self._fits(batch, growth=growth) or not self._batch:
            self._batch.append(request)
            is_new = request.phase is RunPhase.NEW
            self._reasons[request] = Reason.FITS if is_new else Reason.BACK
            self._has_changed = True
        else:
            self._is_blocked = True
            self._reasons[request] = Reason.NO_ROOM

    # -- what comes out ------------------------------------------------------------------------

    def decision(self) -> RunDecision:
        """Return what has come out."""
        are_urgent = set(self._urgent)
        rest = [r for r in self._batch if r not in are_urgent]
        runs = {*self._first.run, *(r.request_id for r in rest)}
        reasons = {r.request_id: Reason.NO_ROOM for r in self._urgent}
        reasons |= {r.request_id: Reason.STAYS for r in rest}
        reasons |= {r.request_id: reason for r, reason in self._reasons.items()}
        valid_for_s = min(self._first.valid_for_s, self._rules.period_s)
        return replace(
            self._first,
            run=(*self._first.run, *(r.request_id for r in rest)),
            park=self._first.park
            | {r.request_id for r in self._others if r.runs and r.request_id not in runs},
            chunk_tokens=self._chunk_tokens(),
            valid_for_s=0.0 if self._is_busy else valid_for_s,
            reasons={**reasons, **self._first.reasons},
        )

    @property
    def _is_busy(self) -> bool:
        has_prompts = any(map(self._snapshot.is_prompt, self._batch))
        is_full = not self._fits(self._batch, growth=self._rules.growth_tokens)
        return self._has_changed or has_prompts or is_full

    def _chunk_tokens(self) -> int | None:
        """Return what the policy would of the whole batch; but no prompt is cut for a reader that
        is less urgent.
        """
        prompts = [r for r in self._batch if self._snapshot.is_prompt(r)]
        most_urgent = min([r.priority for r in prompts], default=math.inf)
        batch = [r if r.priority <= most_urgent else replace(r, rate_tps=0.0) for r in self._batch]
        runs = {r.request_id for r in self._batch}
        waits = any(
            r.phase is RunPhase.NEW and r.request_id not in runs for r in self._snapshot.requests
        )
        steps = Steps(self._snapshot)
        return chunk_tokens(self._snapshot, batch, steps, self._rules, is_waited_for=waits)


def _is_here(request: RunRequest) -> bool:
    return request.phase in (RunPhase.RUNNING, RunPhase.RETURNING)
