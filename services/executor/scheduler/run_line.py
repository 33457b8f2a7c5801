"""`RunSeam` on a layer-wise scheduler: what a run policy sees of it, and how its decision holds.

vLLM admits whoever stands in its queue. While it schedules, the queue holds those only whom the
decision names, in its order; the others are back in it when the step is made.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from services.control.requests.life import State
from services.control.requests.request_record import RequestRecord
from services.control.run_director import RunPlace, phase_in_queue
from services.executor.blocks.residency import RequestKV
from services.executor.scheduler.run_control import RunControl
from services.executor.scheduler.vllm_scheduler import VllmScheduler
from services.placement.run.types import RunDecision, RunPhase
from services.placement.types import EngineShape, RequestId

if TYPE_CHECKING:
    from vllm.v1.request import Request


class RunLine:
    """The queue as a decision orders it."""

    def __init__(
        self, scheduler: VllmScheduler, control: RunControl, shape: Callable[[], EngineShape]
    ) -> None:
        self._scheduler, self._control, self._shape = scheduler, control, shape
        self._decision: RunDecision | None = None
        self._ranks: dict[RequestId, int] = {}  # of the requests that it lets run
        control.line = lambda: scheduler.waiting  # until somebody decides

    @property
    def shape(self) -> EngineShape:
        return self._shape()

    # -- reading -----------------------------------------------------------------------------

    def run_places(self) -> Iterator[RunPlace]:
        """Requests whose reader has stopped are left out: whatever is decided, they do not run."""
        for request in self._scheduler.running:
            record = self._control.record_of(request)
            phase = RunPhase.PARKED if record.state is State.LEAVING else RunPhase.RUNNING
            if not record.holds:
                yield RunPlace(request, record, phase)
        waiting = self._scheduler.waiting
        for request in sorted(waiting, key=lambda one: (one.priority, one.arrival_time)):
            record = self._control.record_of(request)
            phase = phase_in_queue(request, is_returning=record.is_prepared)
            if not record.holds:
                yield RunPlace(request, record, phase)

    def num_host_tokens(self, place: RunPlace) -> int:
        kv = place.record.kv
        if kv is None:
            num_blocks = len(self._control.cached_prefix(place.request, place.record))
        else:
            num_blocks = kv.num_host_blocks if kv.mirrored else 0
        return num_blocks * self.shape.block_size

    def num_returning_bytes(self) -> int:
        return self._control.transfers.num_restoring_blocks() * self.shape.block_bytes

    # -- orders ------------------------------------------------------------------------------

    def park(self, record: RequestRecord[RequestKV]) -> None:
        self._control.leave(record)

    def obey(self, decision: RunDecision) -> None:
        """Let a decision hold from the next step on."""
        if decision is self._decision:
            return
        self._decision = decision
        self._ranks = {name: number for number, name in enumerate(decision.run)}
        self._control.resumes.allow(decision.allowed_ways)
        for name, record in self._control.transfers.owner.records.items():
            if record.state is State.LEAVING and name in self._ranks:
                record.enter(State.PAUSED)  # it had tokens in flight, and has not left yet
        self._control.line = self.line

    def line(self) -> "Sequence[Request]":
        """Return who may be admitted, in order."""
        ranks = self._ranks
        named = (request for request in self._scheduler.waiting if request.request_id in ranks)
        return sorted(named, key=lambda request: ranks[request.request_id])

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
        own_budget = scheduler.max_num_scheduled_tokens
        others = [one for one in everybody if one.request_id not in named]
        queue.remove_requests(everybody)
        for request in line:
            queue.add_request(request)
        if decision.chunk_tokens is not None:
            # Decodes come first: a prompt before them would take their part of the budget.
            scheduler.running.sort(key=_is_prompt)
            num_decodes = sum(not _is_prompt(request) for request in scheduler.running)
            budget = num_decodes + decision.chunk_tokens
            scheduler.max_num_scheduled_tokens = min(own_budget, budget)
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens = own_budget
            for request in others:
                queue.add_request(request)


def _is_prompt(request: "Request") -> bool:
    """Whether more than its newest token is left to compute."""
    return bool(request.num_tokens - request.num_computed_tokens > 1)
