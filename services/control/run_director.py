"""Asks the run policy when there is a reason to, and keeps its decision until there is another.

The policy decides in the engine's process, between two steps: who runs, who is parked, who comes
in. Where layers live stays with the placement policy, which is asked only while the decision says
that layers leave the pool.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeAlias

from services.control.controller import Controller
from services.control.options import ControllerOptions
from services.control.request_state import Progress
from services.control.types import Trigger
from services.placement.admit.layerkv import with_slo_aware_admission
from services.placement.presets import AdmissionPolicy, RunPolicy, with_axes
from services.placement.run import andes, evenflow, fcfs, layerkv_park, tokenflow
from services.placement.run.types import RunDecision, RunPhase, RunRequest, RunSnapshot
from services.placement.types import EngineShape, RequestId

Policy: TypeAlias = Callable[[RunSnapshot], RunDecision]

POLICIES: Mapping[RunPolicy, Policy] = {
    RunPolicy.EVENFLOW: evenflow.decide,
    RunPolicy.TOKENFLOW: tokenflow.decide,
    RunPolicy.ANDES: andes.decide,
    RunPolicy.LAYERKV_PARK: layerkv_park.decide,
    RunPolicy.FCFS_CHUNKED: fcfs.chunked,
    RunPolicy.FCFS_RESERVED: fcfs.sglang,
    RunPolicy.FCFS_RECOMPUTE: fcfs.recompute,
    RunPolicy.FCFS_SWAP: fcfs.swap,
}
MAX_NEW = 16  # of the queue that a policy sees: it admits in the order of arrival


def phase_in_queue(request: Progress, *, is_returning: bool) -> RunPhase:
    """Return where a request is that does not run."""
    if is_returning:
        return RunPhase.RETURNING
    return RunPhase.PARKED if request.num_preemptions else RunPhase.NEW


class RunSeam(Protocol):
    """What the director needs of the scheduler."""

    @property
    def shape(self) -> EngineShape: ...

    def run_places(self) -> Iterable[tuple[Progress, RunPhase, int]]:
        """Yield live requests, those that run first, then the queue by arrival.

        With each where it is, and how many of its leading tokens have a complete host copy.
        """

    def num_returning_bytes(self) -> int:
        """Return what is queued on the way to the pool."""

    def park(self, request_id: RequestId) -> None:
        """Send a running request to the queue; what is on the host stays there."""

    def release_all(self) -> None:
        """Leave all placements to the guard."""

    def obey(self, decision: RunDecision) -> None:
        """Let a decision hold from the next step on: who comes in, and how much of prompts."""


class RunDirector:
    """One engine's decision in force."""

    def __init__(
        self,
        policy: Policy,
        engine: RunSeam,
        controller: Controller,
        now_s: Callable[[], float],
    ) -> None:
        self.decision: RunDecision | None = None  # None: nobody has decided yet
        self.num_decisions = 0
        self._policy, self._engine = policy, engine
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
            if decision.offloads and not wanted:
                self._controller.note(Trigger.LAYERS_LEAVE)
            self._valid_until_s = now_s + decision.valid_for_s
            self.num_decisions += 1
            parked = [
                one.request_id for one in snapshot.requests if one.request_id in decision.park
            ]
            for request_id in parked:  # in the order of the batch, the same in every process
                self._ledger.entries[request_id].num_parks += 1
                self._engine.park(request_id)
            self._engine.obey(decision)
        if not self.wants_layers_away:
            self._engine.release_all()

    def snapshot(self) -> RunSnapshot:
        """Return what the policy is asked with."""
        now_s, rates = self._now_s(), self._meter.rates()
        requests, num_new = [], 0
        for progress, phase, num_host_tokens in self._engine.run_places():
            num_new += phase is RunPhase.NEW
            if num_new <= MAX_NEW or phase is not RunPhase.NEW:
                requests.append(self._request(progress, phase, num_host_tokens, now_s))
        return RunSnapshot(
            requests=tuple(requests),
            engine=self._engine.shape,
            costs=self._meter.costs(),
            h2d_bytes_per_s=rates.h2d_bytes_per_s or 0.0,
            h2d_queued_bytes=self._engine.num_returning_bytes(),
            prefill_frac=self._meter.prefill_frac,
            mean_answer_tokens=self._ledger.answer_lengths.mean_tokens,
        )

    def _request(
        self, progress: Progress, phase: RunPhase, num_host_tokens: int, now_s: float
    ) -> RunRequest:
        entry = self._ledger.entries[progress.request_id]
        interval_s = entry.buffer.interval_s
        runs = phase is RunPhase.RUNNING and entry.run_since_s is not None
        first_s = entry.first_token_s
        predicted = self._ledger.answer_lengths.predict(
            num_output_tokens=progress.num_output_tokens, max_tokens=progress.max_tokens
        )
        return RunRequest(
            request_id=RequestId(progress.request_id),
            phase=phase,
            num_prompt_tokens=progress.num_prompt_tokens,
            num_output_tokens=progress.num_output_tokens,
            max_tokens=progress.max_tokens,
            num_host_tokens=num_host_tokens,
            rate_tps=1.0 / interval_s if interval_s else 0.0,
            slack_s=entry.buffer.slack_s(now_s),
            arrival_age_s=now_s - entry.arrival_s,
            run_age_s=now_s - (entry.run_since_s or 0.0) if runs else math.inf,
            num_parks=entry.num_parks,
            num_computed_tokens=progress.num_computed_tokens,
            decoding_s=0.0 if first_s is None else now_s - first_s,
            slo_ttft_s=entry.buffer.service_level.slo_ttft_s,
            least_answer_tokens=predicted[0] if predicted else 0,
        )


def director_of(
    options: ControllerOptions,
    engine: RunSeam,
    controller: Controller,
    now_s: Callable[[], float],
    *,
    policies: Mapping[RunPolicy, Policy] = POLICIES,
) -> RunDirector | None:
    """Return who asks a preset's run and admission policies; None for vLLM's own order."""
    preset = with_axes(options.policy, options.parameters)
    policy = policies.get(preset.run)
    if preset.admission is AdmissionPolicy.SLO_AWARE:
        policy = with_slo_aware_admission(policy or fcfs.streams)
    if policy is None:
        return None
    return RunDirector(policy, engine, controller, now_s)
