"""Asks the run policy when there is a reason to, and keeps its decision until there is another.

The policy decides in the engine's process, between two steps: who runs, who is parked, who comes
in. Where layers live stays with the placement policy, which is asked only while the decision says
that layers leave the pool.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from services.control.controller import Controller
from services.control.options import ControllerOptions
from services.control.requests.request_record import RequestRecord
from services.control.requests.request_state import SchedulerRequest
from services.control.run_log import RunLog
from services.control.types import Trigger
from services.placement.presets import Run
from services.placement.run.types import RunDecision, RunPhase, RunRequest, RunSnapshot
from services.placement.types import EngineShape, RequestId

MAX_NEW = 16  # of the queue that a policy sees: it admits in the order of arrival


def phase_in_queue(request: SchedulerRequest, *, is_returning: bool) -> RunPhase:
    """Return where a request is that does not run."""
    if is_returning:
        return RunPhase.RETURNING
    return RunPhase.PARKED if request.num_preemptions else RunPhase.NEW


class RunPlace(NamedTuple):
    """A live request, and where it is."""

    request: SchedulerRequest
    record: RequestRecord[Any]
    phase: RunPhase


class RunSeam(Protocol):
    """What the director needs of the scheduler."""

    @property
    def shape(self) -> EngineShape: ...

    def run_places(self) -> Iterable[RunPlace]:
        """Yield live requests, those that run first, then the queue by arrival."""

    def num_host_tokens(self, place: RunPlace) -> int:
        """Return how many leading tokens have a complete copy on the host, cached or its own."""

    def num_returning_bytes(self) -> int:
        """Return what is queued on the way to the pool."""

    def park(self, record: RequestRecord[Any]) -> None:
        """Send a running request to the queue; what is on the host stays there."""

    def obey(self, decision: RunDecision) -> None:
        """Let a decision hold from the next step on: who comes in, and how much of prompts."""


class RunDirector:
    """One engine's decision in force."""

    def __init__(
        self,
        policy: Run,
        engine: RunSeam,
        controller: Controller,
        now_s: Callable[[], float],
        *,
        log: RunLog | None = None,
    ) -> None:
        self.decision: RunDecision | None = None  # None: nobody has decided yet
        self.num_decisions = 0
        self._policy, self._engine, self._log = policy, engine, log
        self._controller, self._now_s = controller, now_s
        self._ledger, self._meter = controller.ledger, controller.meter
        controller.director = self
        self._valid_until_s = -math.inf

    @property
    def wants_layers_away(self) -> bool:
        """Whether the placement policy is asked."""
        return self.decision is not None and self.decision.offloads

    def changed(self) -> None:
        """Decide anew before the next step: somebody came, began, left, was parked, or is back."""
        self._valid_until_s = -math.inf

    def before_schedule(self) -> None:
        """Decide if it is time to, and carry out who is parked."""
        now_s = self._now_s()
        if now_s >= self._valid_until_s:
            wanted, snapshot = self.wants_layers_away, self.snapshot()
            decision = self._policy(snapshot)
            self.decision = decision
            if self._log is not None:
                self._log.append(snapshot, decision)
            if decision.offloads and not wanted:
                self._controller.note(Trigger.LAYERS_LEAVE)
            self._valid_until_s = now_s + decision.valid_for_s
            self.num_decisions += 1
            parked = [
                one.request_id for one in snapshot.requests if one.request_id in decision.park
            ]
            for request_id in parked:  # in the order of the batch, the same in every process
                record = self._ledger.records[request_id]
                record.num_parks += 1
                self._engine.park(record)
            self._engine.obey(decision)
            self._note_reasons(snapshot.requests, decision)
        if not self.wants_layers_away:
            for record in self._ledger.records.values():
                record.floor = None  # all placements are the guard's

    def _note_reasons(self, requests: Iterable[RunRequest], decision: RunDecision) -> None:
        """Remember why each request runs or waits; count those that are new."""
        for request in requests:
            record = self._ledger.records[request.request_id]
            reason = decision.reason(request.request_id)
            if reason is not record.reason:
                record.reason = reason
                self._controller.counts.reasons[reason.value] += 1

    def snapshot(self) -> RunSnapshot:
        """Return what the policy is asked with."""
        now_s, rates = self._now_s(), self._meter.rates()
        requests, num_new = [], 0
        for place in self._engine.run_places():
            num_new += place.phase is RunPhase.NEW
            if num_new <= MAX_NEW or place.phase is not RunPhase.NEW:
                requests.append(self._request(place, now_s))
        return RunSnapshot(
            requests=tuple(requests),
            engine=self._engine.shape,
            costs=self._meter.costs(),
            h2d_bytes_per_s=rates.h2d_bytes_per_s or 0.0,
            h2d_queued_bytes=self._engine.num_returning_bytes(),
            prefill_frac=self._meter.prefill_frac,
            mean_answer_tokens=self._ledger.answer_lengths.mean_tokens,
        )

    def _request(self, place: RunPlace, now_s: float) -> RunRequest:
        progress, record = place.request, place.record
        interval_s = record.buffer.interval_s
        runs = place.phase is RunPhase.RUNNING and record.run_since_s is not None
        first_s = record.first_token_s
        num_output_tokens, max_tokens = progress.num_output_tokens, progress.max_tokens
        longer = self._ledger.answer_lengths.predict(
            num_output_tokens=num_output_tokens, max_tokens=max_tokens
        )
        return RunRequest(
            request_id=RequestId(progress.request_id),
            phase=place.phase,
            num_prompt_tokens=progress.num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            max_tokens=max_tokens,
            num_host_tokens=self._engine.num_host_tokens(place),
            rate_tps=1.0 / interval_s if interval_s else 0.0,
            slack_s=record.buffer.slack_s(now_s),
            arrival_age_s=now_s - record.arrival_s,
            run_age_s=now_s - (record.run_since_s or 0.0) if runs else math.inf,
            num_parks=record.num_parks,
            num_computed_tokens=progress.num_computed_tokens,
            decoding_s=0.0 if first_s is None else now_s - first_s,
            slo_ttft_s=record.buffer.service_level.slo_ttft_s,
            least_answer_tokens=longer[0] if longer else 0,
        )


def director_of(
    options: ControllerOptions,
    engine: RunSeam,
    controller: Controller,
    now_s: Callable[[], float],
) -> RunDirector | None:
    """Return what asks the policy that runs; None for vLLM's own order."""
    run = options.run
    if run is None:
        return None
    log = RunLog(options) if options.run_log else None
    return RunDirector(run, engine, controller, now_s, log=log)
