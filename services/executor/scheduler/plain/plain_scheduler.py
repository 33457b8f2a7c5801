"""vLLM's schedulers, knowing what each request was promised and how far its reader is.

Named by `scheduler_cls`, so that this module is imported in the EngineCore process. vLLM picks
between a synchronous and an asynchronous scheduler; there is one of ours for each.
"""

import time
from operator import itemgetter
from typing import Any

import structlog
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from services.control.admission import run_policy_of
from services.control.counters import Counters
from services.control.measures.step_timing import StepTiming
from services.control.options import ControllerOptions
from services.control.order.run_order import RunOrder
from services.control.plans.planner import Planner
from services.control.requests.life import State
from services.control.requests.request_record import RequestRecord
from services.control.step_loop import StepLoop
from services.control.types import Trigger
from services.executor.blocks.residency import RequestKV
from services.executor.scheduler.plain.whole_engine import WholeEngine
from services.executor.scheduler.reader_state import ReaderStateMixin
from services.executor.scheduler.run_control import RunControl
from services.executor.scheduler.step_watch import StepWatch
from services.placement.presets import Run
from services.placement.run.reason import Reason

log = structlog.get_logger()

MIN_HELD_S = 1.0  # before a request is computed again for others' sake


# Why a run policy lets a request wait for which there is room.
NOT_FOR_ROOM = frozenset({Reason.IN_HAND, Reason.PROMPTS, Reason.BEHIND, Reason.OTHERS_TURN})


def _lacks_room(record: RequestRecord[RequestKV]) -> bool:
    """Return whether a request in the queue would run if others gave it their blocks."""
    return not record.is_held and record.why not in NOT_FOR_ROOM


class PlainSchedulerMixin(ReaderStateMixin):
    """Leaves blocks to vLLM. Skips requests whose readers have stopped; where there is a run
    policy, that says which are admitted and which leave.

    Requests that are held keep their places and their blocks until others wait for them: then one
    after the other is preempted, and computed again once its reader goes on.
    """

    _others_wait = False  # after the step before, for lack of room

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine = WholeEngine(self, self.records)
        self.order: RunOrder[Request, RequestKV] = RunOrder(self.engine)
        self.control = RunControl(self, self.order, Counters())
        self.set_up(ControllerOptions.of(self.vllm_config))

    def set_up(
        self, options: ControllerOptions, _planner: Planner | None = None, policy: Run | None = None
    ) -> None:
        """Start with a loop that knows nothing. There may be no requests.

        `policy`: run policy in place of the options'. Without one the order is vLLM's.
        """
        assert not self.requests
        self._watch, self.loop = StepWatch(self.records), None
        self.order.obey(None)
        policy = policy or run_policy_of(options)
        if policy is not None and self.engine.can_plan:
            self.loop = StepLoop(options, self.order, None, policy, time.monotonic)
        elif policy is not None:
            log.warning("policy_without_effect", policy=options.policy, reason="no KV that grows")

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self.loop is not None:
            self.engine.look()
            self.loop.before_schedule()
        if self._others_wait:
            self._give_way()
        self.control.stop_and_start()
        with self.control.admitting():
            output = super().schedule(*args, **kwargs)
        for request in self._admitted(output):
            self.records[request.request_id].enter(State.RUNNING)
        self._others_wait = any(_lacks_room(self.records[one.request_id]) for one in self.waiting)
        self.control.after_step(num_scheduled=output.total_num_scheduled_tokens)
        if self.loop is not None:
            self._report(self.loop, output)
        return output

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
        if request is not None and now_s - since_s >= MIN_HELD_S:
            self.control.preempt(request)

    def _report(self, loop: StepLoop, output: SchedulerOutput) -> None:
        """Tell the loop of a step as it leaves."""
        since_s = time.monotonic()
        step = self._watch.scheduled(output, loop.begun_s)
        loop.note(*self._watch.progress(output, self.running))
        loop.after_schedule(step, since_s)

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, *args)
        if self.loop is not None:
            ran = bool(scheduler_output.total_num_scheduled_tokens)
            layer_s = self.step_clock.last_step_s / self.engine.shape.num_layers if ran else 0.0
            self.loop.after_update(StepTiming(layer_s=layer_s), busy=self.has_requests())
        return outputs

    # -- a request's life -------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if self.loop is not None:
            self.engine.arrived(request)
            self.loop.changed()

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Say whether a waiting request may run."""
        is_held = self.records[request.request_id].is_held
        return not is_held and super()._handle_blocked_waiting_request(request)

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(*args, **kwargs)
        if self.loop is not None:
            self.loop.note(Trigger.PREEMPTED)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self.loop is not None:
            aborted = request.status == RequestStatus.FINISHED_ABORTED
            self.loop.ended(num_output_tokens=None if aborted else request.num_output_tokens)
            self.engine.ended(request)
        return super()._free_request(request, *args, **kwargs)

    def shutdown(self) -> None:
        if self.loop is not None:
            self.loop.close()
        super().shutdown()

    def check_integrity(self) -> None:
        super().check_integrity()
        self.control.check_integrity()


class EvenflowScheduler(PlainSchedulerMixin, Scheduler):  # type: ignore[misc]
    """The synchronous one."""


class EvenflowAsyncScheduler(PlainSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
    """The one that schedules a step ahead of the model."""
