"""`RunSeam` on a layer-wise scheduler: what a run policy sees of it, and how its decision holds.

vLLM admits whoever stands in its queue. While it schedules, the queue holds those only whom the
decision names, in its order; the others are back in it when the step is made.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from services.control.run_director import phase_in_queue
from services.executor.scheduler.holds import HoldKind
from services.executor.scheduler.run_control import RunControl
from services.executor.scheduler.vllm_scheduler import VllmScheduler
from services.placement.run.types import RunDecision, RunPhase
from services.placement.types import EngineShape, RequestId

if TYPE_CHECKING:
    from vllm.v1.request import Request


class RunLine:
    """The queue as a decision orders it."""

    def __init__(self, scheduler: VllmScheduler, control: RunControl, shape: EngineShape) -> None:
        self._scheduler, self._control, self._shape = scheduler, control, shape
        self._owner = control.transfers.owner
        self._decision: RunDecision | None = None
        control.line = lambda: scheduler.waiting  # until somebody decides
        self._budget = scheduler.max_num_scheduled_tokens  # vLLM's own, per step

    @property
    def shape(self) -> EngineShape:
        return self._shape

    # -- reading -----------------------------------------------------------------------------

    def run_places(self) -> "Iterator[tuple[Request, RunPhase, int]]":
        """Requests whose reader has stopped are left out: whatever is decided, they do not run."""
        holds = self._control.holds
        for request in self._scheduler.running:
            kind = holds.kind(request.request_id)
            if kind is not HoldKind.PAUSE:
                phase = RunPhase.RUNNING if kind is None else RunPhase.PARKED
                yield request, phase, self._num_host_tokens(request)
        waiting = self._scheduler.waiting
        for request in sorted(waiting, key=lambda one: (one.priority, one.arrival_time)):
            if holds.kind(request.request_id) is not HoldKind.PAUSE:
                is_returning = self._control.resumes.is_preparing(request.request_id)
                phase = phase_in_queue(request, is_returning=is_returning)
                yield request, phase, self._num_host_tokens(request)

    def _num_host_tokens(self, request: "Request") -> int:
        kv = self._owner.requests.get(request.request_id)
        if kv is None or not kv.mirrored:
            return 0
        return kv.num_host_blocks * self._shape.block_size

    def num_returning_bytes(self) -> int:
        return self._control.transfers.num_restoring_blocks() * self._shape.block_bytes

    # -- orders ------------------------------------------------------------------------------

    def park(self, request_id: RequestId) -> None:
        self._control.leave(request_id)

    def release_all(self) -> None:
        self._control.guard.given.clear()

    def obey(self, decision: RunDecision) -> None:
        """Let a decision hold from the next step on."""
        if decision is self._decision:
            return
        self._decision = decision
        self._control.resumes.allow(decision.allowed_ways)
        leaving = self._control.holds.ids(HoldKind.LEAVE)
        for request_id in decision.run:
            if request_id in leaving:  # it had tokens in flight, and has not left yet
                self._control.resume(request_id)
        self._control.line = self.line

    def line(self) -> "Sequence[Request]":
        """Return who may be admitted, in order."""
        assert self._decision is not None
        waiting = {request.request_id: request for request in self._scheduler.waiting}
        return [waiting[name] for name in self._decision.run if name in waiting]

    @contextmanager
    def admitting(self) -> Iterator[None]:
        """Let vLLM see the line alone, and no more of prompts than the decision's chunk."""
        decision, scheduler = self._decision, self._scheduler
        if decision is None:
            yield
            return
        line = self.line()
        named = {request.request_id for request in line}
        queue, everybody = scheduler.waiting, list(scheduler.waiting)
        others = [one for one in everybody if one.request_id not in named]
        queue.remove_requests(everybody)
        for request in line:
            queue.add_request(request)
        if decision.chunk_tokens is not None:
            # Decodes come first: a prompt before them would take their part of the budget.
            scheduler.running.sort(key=_is_prompt)
            num_decodes = sum(not _is_prompt(request) for request in scheduler.running)
            budget = num_decodes + decision.chunk_tokens
            scheduler.max_num_scheduled_tokens = min(self._budget, budget)
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens = self._budget
            for request in others:
                queue.add_request(request)


def _is_prompt(request: "Request") -> bool:
    """Whether more than its newest token is left to compute."""
    return bool(request.num_tokens - request.num_computed_tokens > 1)
