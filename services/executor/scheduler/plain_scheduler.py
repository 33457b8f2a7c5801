"""vLLM's schedulers, knowing what each request was promised and how far its reader is.

Named by `scheduler_cls`, so that this module is imported in the EngineCore process. vLLM picks
between a synchronous and an asynchronous scheduler; there is one of ours for each.
"""

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from services.control.request_record import Hold, HoldKind, RequestRecord
from services.executor.blocks.residency import RequestKV
from services.executor.scheduler.reader_state import ReaderStateMixin
from services.executor.scheduler.vllm_scheduler import IDLE_WAIT_S, NEVER


class PlainSchedulerMixin(ReaderStateMixin):
    """Skips requests whose readers have stopped; everything else is vLLM's.

    They keep their places and their blocks: there are no layers to give back.
    """

    def hold_back(self, record: RequestRecord[RequestKV], *, held: bool) -> None:
        record.hold = Hold(HoldKind.PAUSE, time.monotonic()) if held else None

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._stop_and_start()
        output = super().schedule(*args, **kwargs)
        if not output.total_num_scheduled_tokens and any(
            record.is_held for record in self.records.values()
        ):
            time.sleep(IDLE_WAIT_S)
        return output

    def _stop_and_start(self) -> None:
        """Tell vLLM which running requests to skip in the next step."""
        for request in self.running:
            record = self.records[request.request_id]
            if record.is_held:
                record.skipped = True
                request.next_decode_eligible_step = NEVER
            elif record.skipped and request.num_in_flight_tokens == 0:
                # Wait for its token in flight: the scheduler would read it from the previous step.
                record.skipped = False
                request.next_decode_eligible_step = 0


class EvenflowScheduler(PlainSchedulerMixin, Scheduler):  # type: ignore[misc]
    """The synchronous one."""


class EvenflowAsyncScheduler(PlainSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
    """The one that schedules a step ahead of the model."""
