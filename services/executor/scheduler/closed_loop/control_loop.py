"""The closed loop beside a layer-wise scheduler: what the controller is told, and when it acts."""

import multiprocessing
import time
from collections.abc import Callable

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from services.control.controller import Controller
from services.control.options import ControllerOptions
from services.control.plans.planner import Planner
from services.control.requests.request_ledger import RequestLedger
from services.control.requests.request_record import RequestRecord, Stage
from services.control.run_director import director_of
from services.control.types import Trigger
from services.executor.blocks.residency import RequestKV
from services.executor.scheduler.closed_loop.kv_view import has_caught_up
from services.executor.scheduler.closed_loop.planner_client import PlannerClient
from services.executor.scheduler.closed_loop.scheduler_seam import SchedulerSeam
from services.executor.scheduler.closed_loop.step_watch import StepWatch
from services.executor.scheduler.run_control import RunControl
from services.executor.scheduler.run_line import RunLine
from services.executor.scheduler.vllm_scheduler import VllmScheduler
from services.executor.stats.kv_stats import KVStats
from services.executor.step_messages import StepFeedback
from services.kit.telemetry import log
from services.placement.step_time.batch import SEALING_STEPS
from services.placement.types import EngineShape

STEPS_PER_STATS = 32


class ControlLoop:
    """One controller, from the scheduler's first step to its last."""

    def __init__(
        self,
        scheduler: VllmScheduler,
        control: RunControl,
        options: ControllerOptions,
        planner: Planner | None,
        shape: Callable[[], EngineShape],
    ) -> None:
        if multiprocessing.parent_process() is not None:
            log.configure("executor-engine", "info")
        self._records = control.transfers.owner.records
        self._ledger = ledger = RequestLedger(self._records)
        self.seam = SchedulerSeam(scheduler, control, ledger, options, shape)
        self.controller = Controller(options, self.seam, planner, ledger, time.monotonic)
        self.line = RunLine(scheduler, control, shape)
        self.director = director_of(options, self.line, self.controller, time.monotonic)
        self._scheduler = scheduler
        self._watch = StepWatch(self._records)
        self._num_steps_unreported = 0
        self._called_s = self._begin_s = 0.0  # of the present step

    # -- each step ---------------------------------------------------------------------------

    def before_schedule(self) -> None:
        """Carry out the plans that came, and end pauses that have lasted too long."""
        self._called_s = time.monotonic()
        self.controller.before_schedule()
        if self.director is not None:
            self.director.before_schedule()
        self._begin_s = time.monotonic()

    def changed(self) -> None:
        """Have the run policy asked before the next step."""
        if self.director is not None:
            self.director.changed()

    def after_schedule(self, output: SchedulerOutput) -> None:
        """Predict the step, and ask for a plan while it runs if there is a reason to."""
        end_s = time.monotonic()
        step = self._watch.scheduled(output, self._begin_s)
        self._ledger.scheduled(output.num_scheduled_tokens, self._begin_s)
        self._note_progress(output)
        self.controller.after_schedule(step)
        self.controller.spent(self._begin_s - self._called_s + time.monotonic() - end_s)

    def _note_progress(self, output: SchedulerOutput) -> None:
        """Tell the controller who was admitted, who begins to decode, whose copy is complete."""
        note = self.controller.note
        admitted = len(output.scheduled_new_reqs) + len(
            output.scheduled_cached_reqs.resumed_req_ids
        )
        note(*[Trigger.ADMITTED] * admitted)
        for request in self._scheduler.running:
            record = self._records[request.request_id]
            if record.stage is Stage.PREFILL and request.num_computed_tokens >= request.num_tokens:
                record.stage = Stage.DECODES
                note(Trigger.PREFILLED)
            if record.stage is Stage.DECODES:
                self._note_copy(record)

    def _note_copy(self, record: RequestRecord[RequestKV]) -> None:
        kv = record.kv
        if kv is None or not kv.mirrored:
            record.stage = Stage.MIRRORED
        elif has_caught_up(kv, slack_blocks=SEALING_STEPS):
            record.stage = Stage.MIRRORED
            self.controller.note(Trigger.MIRRORED)

    def after_update(self, feedback: StepFeedback | None) -> None:
        """Take in how the oldest step in flight went."""
        if feedback is not None:
            self._watch.ended(feedback)
        timing = None if feedback is None else feedback.timing
        self.controller.after_update(timing, busy=self._scheduler.has_requests())

    # -- a request's life --------------------------------------------------------------------

    def preempted(self) -> None:
        self.controller.note(Trigger.PREEMPTED)

    def ended(self, request: Request) -> None:
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        num_output_tokens = None if aborted else request.num_output_tokens
        self._ledger.ended(time.monotonic(), num_output_tokens=num_output_tokens)
        self.controller.note(Trigger.ABORTED if aborted else Trigger.FINISHED)

    # -- figures -----------------------------------------------------------------------------

    def take_stats(self) -> KVStats | None:
        """Return the controller's counts once in a while, for most steps change little, and when
        there are no requests: that step may be the last one for long.
        """
        self._num_steps_unreported += 1
        if self._num_steps_unreported < STEPS_PER_STATS and self._records:
            return None
        self._num_steps_unreported = 0
        return KVStats(data={"controller": self.controller.counts.take()})


def make_planner(options: ControllerOptions) -> PlannerClient | None:
    """Return who is asked; None if there is nobody: the capacity guard acts alone."""
    if not options.planner_address:
        return None
    return PlannerClient(
        options.planner_address,
        transport=options.transport,
        timeout_s=options.plan_timeout_s,
        shadow_policy=options.shadow_policy,
    )
