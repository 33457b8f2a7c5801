"""vLLM's schedulers, knowing what each request was promised and how far its reader is.

Named by `scheduler_cls`, so that this module is imported in the EngineCore process. vLLM picks
between a synchronous and an asynchronous scheduler; there is one of ours for each.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from services.executor.observation import RequestState
from services.executor.scheduler.parent_watch import end_with_parent
from services.executor.scheduler.plain_holds import PlainHolds
from services.executor.scheduler.reader_state import ReaderStateMixin


class EvenflowSchedulerMixin(ReaderStateMixin):
    """Keeps a buffer per request from its arrival to its end; schedules as vLLM does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        end_with_parent()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every buffer belongs to a request that vLLM still has."""
        left_over = self.buffers.keys() - self.requests.keys()  # type: ignore[attr-defined]
        assert not left_over, f"buffers of requests that are gone: {sorted(left_over)}"


class PlainSchedulerMixin(EvenflowSchedulerMixin):
    """Skips held requests; everything else is vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._holds = PlainHolds()

    def hold_back(self, request_id: str, *, held: bool) -> None:
        self._holds.set(request_id, held=held)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._holds.stop_and_start(self.running)  # type: ignore[attr-defined]
        output = super().schedule(*args, **kwargs)
        self._holds.after_step(num_scheduled=output.total_num_scheduled_tokens)
        return output

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._holds.forget(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def state_of(self, request: Request) -> RequestState:
        held = request.request_id in self._holds and request.status == RequestStatus.RUNNING
        return RequestState.PAUSED if held else super().state_of(request)


class EvenflowScheduler(PlainSchedulerMixin, Scheduler):  # type: ignore[misc]
    """The synchronous one."""


class EvenflowAsyncScheduler(PlainSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
    """The one that schedules a step ahead of the model."""
