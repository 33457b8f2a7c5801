"""vLLM's schedulers, knowing what each request was promised and how far its reader is.

Named by `scheduler_cls`, so that this module is imported in the EngineCore process. vLLM picks
between a synchronous and an asynchronous scheduler; there is one of ours for each.
"""

import time
from operator import itemgetter
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from services.control.requests.life import State
from services.control.requests.request_record import RequestRecord
from services.executor.blocks.residency import RequestKV
from services.executor.scheduler.reader_state import ReaderStateMixin
from services.executor.scheduler.vllm_scheduler import IDLE_WAIT_S, NEVER

MIN_HELD_S = 1.0  # before a request is computed again for others' sake


class PlainSchedulerMixin(ReaderStateMixin):
    """Skips requests whose readers have stopped; everything else is vLLM's.

    They keep their places and their blocks until others wait for them: then one after the other is
    preempted, and computed again once its reader goes on.
    """

    _others_wait = False  # after the step before, for lack of room

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self._others_wait:
            self._give_way()
        self._stop_and_start()
        output = super().schedule(*args, **kwargs)
        for request in self._admitted(output):
            self.records[request.request_id].enter(State.RUNNING)
        self._others_wait = any(not self.records[one.request_id].is_held for one in self.waiting)
        if not output.total_num_scheduled_tokens and any(
            record.is_held for record in self.records.values()
        ):
            time.sleep(IDLE_WAIT_S)
        return output

    def _stop_and_start(self) -> None:
        """Tell vLLM which running requests to skip in the next step."""
        for request in self.running:
            record = self.records[request.request_id]
            if record.is_held and record.state is State.RUNNING:
                record.enter(State.PAUSED)
                request.next_decode_eligible_step = NEVER
            elif not record.is_held and record.state is State.PAUSED:
                self._start(request, record)

    def _start(self, request: Request, record: RequestRecord[RequestKV]) -> None:
        # Wait for its token in flight: the scheduler would read it from the previous step.
        if request.num_in_flight_tokens == 0:
            record.enter(State.RUNNING)
            request.next_decode_eligible_step = 0

    def _give_way(self) -> None:
        """Preempt the request that has been held longest, if for long."""
        held = [
            (since_s, request)
            for request in self.running
            if (since_s := self.records[request.request_id].held_since_s) is not None
            and not request.num_in_flight_tokens
        ]
        now_s = time.monotonic()
        since_s, request = min(held, key=itemgetter(0), default=(now_s, None))
        if request is None or now_s - since_s < MIN_HELD_S:
            return
        self.running.remove(request)
        self._preempt_request(request, now_s)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Say whether a waiting request may run."""
        is_held = self.records[request.request_id].is_held
        return not is_held and super()._handle_blocked_waiting_request(request)


class EvenflowScheduler(PlainSchedulerMixin, Scheduler):  # type: ignore[misc]
    """The synchronous one."""


class EvenflowAsyncScheduler(PlainSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
    """The one that schedules a step ahead of the model."""
