"""vLLM's schedulers, knowing what each request was promised and how far its reader is.

Named by `scheduler_cls`, so that this module is imported in the EngineCore process. vLLM picks
between a synchronous and an asynchronous scheduler; there is one of ours for each.
"""

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from services.executor.scheduler.holds import IDLE_WAIT_S, NEVER
from services.executor.scheduler.reader_state import ReaderStateMixin


class PlainSchedulerMixin(ReaderStateMixin):
    """Skips requests whose readers have stopped; everything else is vLLM's.

    They keep their places and their blocks: there are no layers to give back.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: set[str] = set()
        self._stopped: set[str] = set()  # that vLLM was told to skip

    def hold_back(self, request_id: str, *, held: bool) -> None:
        if held:
            self._held.add(request_id)
        else:
            self._held.discard(request_id)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self._held or self._stopped:
            self._stop_and_start()
        output = super().schedule(*args, **kwargs)
        if self._held and not output.total_num_scheduled_tokens:
            time.sleep(IDLE_WAIT_S)
        return output

    def _stop_and_start(self) -> None:
        """Tell vLLM which running requests to skip in the next step."""
        for request in self.running:
            if request.request_id in self._held:
                self._stopped.add(request.request_id)
                request.next_decode_eligible_step = NEVER
            elif request.request_id in self._stopped and request.num_in_flight_tokens == 0:
                # Wait for its token in flight: the scheduler would read it from the previous step.
                self._stopped.discard(request.request_id)
                request.next_decode_eligible_step = 0

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._held.discard(request.request_id)
        self._stopped.discard(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def is_held(self, request: Request) -> bool:
        return request.request_id in self._held


class EvenflowScheduler(PlainSchedulerMixin, Scheduler):  # type: ignore[misc]
    """The synchronous one."""


class EvenflowAsyncScheduler(PlainSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
    """The one that schedules a step ahead of the model."""
