"""Asks the run policy when there is a reason to, and keeps its decision until there is another.

The policy decides in the engine's process, between two steps, which requests run, are parked, and
come in. Where layers live stays with the placement policy, which is asked only while the decision
says that layers leave the pool.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Generic

from services.control.engine import RequestT
from services.control.kv import KVT
from services.control.measures.rates import Rates
from services.control.options import ControllerOptions
from services.control.order.fair_shares import FairShares
from services.control.order.run_order import RunOrder
from services.control.prefixes.shared_prefixes import shared_prefixes
from services.control.requests.life import State
from services.control.requests.request_ledger import RequestLedger
from services.control.requests.request_record import RequestRecord
from services.control.requests.request_state import SchedulerRequest
from services.control.run_log import RunLog
from services.control.step_meter import StepMeter
from services.placement.presets import Run
from services.placement.run.newcomers import Claim, in_shares
from services.placement.run.reason import Reason
from services.placement.run.types import RunDecision, RunPhase, RunRequest, RunSnapshot
from services.placement.types import EngineShape, RequestId

MAX_NEW = 16  # of the queue that a policy sees, in its order, and the oldest of the others


def phase_in_queue(request: SchedulerRequest, *, is_returning: bool) -> RunPhase:
    """Return where a request is that does not run."""
    if is_returning:
        return RunPhase.RETURNING
    return RunPhase.PARKED if request.num_preemptions else RunPhase.NEW


class Admission(Generic[RequestT, KVT]):
    """One engine's decision in force."""

    def __init__(
        self,
        policy: Run,
        order: RunOrder[RequestT, KVT],
        ledger: RequestLedger,
        meter: StepMeter,
        shares: FairShares | None = None,
    ) -> None:
        """`shares`: of fairness ids; None: they have none."""
        self.decision: RunDecision | None = None  # None: the policy has not decided yet
        self.num_decisions = 0
        self._policy, self._engine, self._order = policy, order.engine, order
        self._ledger, self._meter, self._shares = ledger, meter, shares
        self._valid_until_s = -math.inf
        self._unseen: list[RequestRecord[KVT]] = []  # in the queue, and held: not decided about

    @property
    def layers_leave(self) -> bool:
        """Whether the placement policy is asked."""
        return self.decision is not None and self.decision.offloads

    def changed(self) -> None:
        """Decide anew before the next step: a request came, began, left, was parked or is back."""
        self._valid_until_s = -math.inf

    def before_schedule(self, now_s: float) -> list[Reason]:
        """Decide if it is time to, and carry it out; return the reasons that are new."""
        new: list[Reason] = []
        comes_back = not all(record.holds for record in self._unseen)
        if now_s >= self._valid_until_s or comes_back:
            snapshot = self.snapshot(now_s)
            self.decision = decision = self._policy(snapshot)
            self._valid_until_s = now_s + decision.valid_for_s
            self.num_decisions += 1
            queued = (self._engine.records[one.request_id] for one in self._engine.waiting)
            self._unseen = [record for record in queued if record.holds]
            self._carry_out(decision, snapshot)
            new = self._new_reasons(decision, snapshot)
        if not self.layers_leave:
            for record in self._engine.records.values():
                record.forget_floor()  # all placements are the guard's
        return new

    def _carry_out(self, decision: RunDecision, snapshot: RunSnapshot) -> None:
        """Park in the order of the batch, the same in every process."""
        for request in snapshot.requests:
            if request.request_id in decision.park:
                record = self._engine.records[request.request_id]
                record.num_parks += 1
                self._engine.park(record)
        self._order.obey(decision)

    def _new_reasons(self, decision: RunDecision, snapshot: RunSnapshot) -> list[Reason]:
        """Remember why each request runs or waits."""
        new = []
        for request in snapshot.requests:
            record = self._engine.records[request.request_id]
            reason = decision.reason(request.request_id)
            if reason is not record.reason:
                record.reason = reason
                new.append(reason)
        return new

    # -- what the policy sees ----------------------------------------------------------------

    def snapshot(self, now_s: float) -> RunSnapshot:
        """Return what the policy is asked with: without requests that are held."""
        if self._shares is not None:
            self._shares.hold(self._held(), now_s)
        rates, seen = self._meter.rates(), self._seen()
        shared = shared_prefixes([self._engine.stretches(request) for request, _ in seen])
        requests = [
            self._request(request, phase, now_s, prefixes)
            for (request, phase), prefixes in zip(seen, shared.of, strict=True)
        ]
        return RunSnapshot(
            requests=tuple(requests),
            prefix_rows=shared.rows,
            engine=self._engine.shape,
            costs=self._meter.costs(),
            h2d_bytes_per_s=rates.h2d_bytes_per_s or 0.0,
            h2d_queued_bytes=self._engine.num_returning_bytes(),
            prefill_frac=self._meter.prefill_frac,
            mean_answer_tokens=self._ledger.answer_lengths.mean_tokens,
            h2d_free_frac=self._h2d_free_frac(rates),
            ahead_s=0.0 if self._shares is None else self._shares.ahead_s,
        )

    def _held(self) -> dict[str, float]:
        """Return how many tokens of KV in the pool each fairness id has, of those with requests."""
        held, records = dict[str, float](), self._engine.records
        for request in self._engine.live:
            record = records[request.request_id]
            num_tokens = _num_pool_tokens(request, record, self._engine.shape)
            held[record.fairness_id] = held.get(record.fairness_id, 0.0) + num_tokens
        return held

    def _h2d_free_frac(self, rates: Rates) -> float:
        """Return the share of the link's time that the batch's own loads leave."""
        num_blocks = self._engine.num_step_load_blocks(self._order.active_needs())
        if not num_blocks or not rates.h2d_bytes_per_s:
            return 1.0
        load_s = num_blocks * self._engine.shape.block_bytes / rates.h2d_bytes_per_s
        return 1.0 - load_s / max(load_s, rates.step_s or 0.0)

    def _seen(self) -> list[tuple[RequestT, RunPhase]]:
        """Return the requests that the policy sees: of the queue its head, and the oldest newcomer,
        which may be less urgent than all of the head.
        """
        places = list(self._places())
        new = self._in_shares([request for request, phase in places if phase is RunPhase.NEW])
        oldest = min(new, key=lambda request: request.arrival_time, default=None)
        hidden = {id(request) for request in new[MAX_NEW:] if request is not oldest}
        return [place for place in places if id(place[0]) not in hidden]

    def _in_shares(self, new: list[RequestT]) -> list[RequestT]:
        """Return newcomers of each priority, as their fairness ids have shares."""
        shares = self._shares
        if shares is None:
            return new

        def claim(request: RequestT) -> Claim:
            name = self._engine.records[request.request_id].fairness_id
            return Claim(name, shares.standing(name), request.num_tokens)

        classes = groupby(new, key=lambda request: self._arrival(request)[0])
        lines = (in_shares(list(alike), claim, ahead_s=shares.ahead_s) for _, alike in classes)
        return [request for line in lines for request in line]

    def _places(self) -> Iterator[tuple[RequestT, RunPhase]]:
        """Yield where requests are: first those that run, then the queue by arrival."""
        records = self._engine.records
        for request in self._engine.running:
            record = records[request.request_id]
            if not record.holds:
                leaves = record.state is State.LEAVING
                yield request, RunPhase.PARKED if leaves else RunPhase.RUNNING
        for request in sorted(self._engine.waiting, key=self._arrival):
            record = records[request.request_id]
            if not record.holds:
                yield request, phase_in_queue(request, is_returning=record.is_prepared)

    def _arrival(self, request: RequestT) -> tuple[int, float]:
        return self._engine.records[request.request_id].priority, request.arrival_time

    def _request(
        self, request: RequestT, phase: RunPhase, now_s: float, prefixes: Sequence[int]
    ) -> RunRequest:
        record = self._engine.records[request.request_id]
        runs = phase is RunPhase.RUNNING and record.run_since_s is not None
        first_s = record.first_token_s
        num_output_tokens, max_tokens = request.num_output_tokens, request.max_tokens
        longer = self._ledger.answer_lengths.predict(
            num_output_tokens=num_output_tokens, max_tokens=max_tokens
        )
        return RunRequest(
            request_id=RequestId(request.request_id),
            phase=phase,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            max_tokens=max_tokens,
            num_host_tokens=self._num_host_tokens(request, record),
            rate_tps=record.buffer.rate_tps,
            slack_s=record.buffer.slack_s(now_s),
            arrival_age_s=now_s - record.arrival_s,
            run_age_s=now_s - (record.run_since_s or 0.0) if runs else math.inf,
            num_parks=record.num_parks,
            num_computed_tokens=request.num_computed_tokens,
            decoding_s=0.0 if first_s is None else now_s - first_s,
            slo_ttft_s=record.buffer.service_level.slo_ttft_s,
            least_answer_tokens=longer[0] if longer else 0,
            prefixes=prefixes,
            tokens_per_step=self._ledger.tokens_per_step_of(record),
            priority=record.priority,
            waited_s=record.waited_s if runs else record.away_s(now_s),
            fairness_id=record.fairness_id if self._shares else "",
            attained=self._shares.standing(record.fairness_id) if self._shares else 0.0,
        )

    def _num_host_tokens(self, request: RequestT, record: RequestRecord[KVT]) -> int:
        """Return how many leading tokens have a complete copy on the host, cached or its own."""
        kv = record.kv
        if kv is None:
            return len(self._order.cached_prefix(request)) * self._engine.shape.block_size
        num_blocks = kv.num_host_blocks if kv.mirrored else 0
        return max(num_blocks * self._engine.shape.block_size, kv.num_side_tokens)


def _num_pool_tokens(
    request: SchedulerRequest, record: RequestRecord[Any], shape: EngineShape
) -> float:
    """Return the tokens whose KV a request has in the pool; of what several have, its part."""
    kv = record.kv
    if kv is None:  # the engine's own blocks, or none
        return 0 if record.state.is_queued else request.num_computed_tokens
    num_blocks: float = kv.num_owned + sum(one.num_owned / len(one.users) for one in kv.trunks)
    return num_blocks * shape.block_size / shape.num_groups


def run_policy_of(options: ControllerOptions) -> Run | None:
    """Return the policy that decides what runs, logged if asked for; None for vLLM's own order."""
    policy = options.run
    if policy is None or not options.run_log:
        return policy
    return RunLog(options).logged(policy)
