"""The layer-wise schedulers with the closed loop around each step.

Named by `scheduler_cls`. Everything that a plan changes is decided here, in the scheduler's
process, and travels with the step, so that all ranks do the same.
"""

import multiprocessing
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from services.control.controller import Controller
from services.control.options import ControllerOptions
from services.control.planner import Planner
from services.control.triggers import is_decided_locally
from services.control.types import Trigger
from services.executor.scheduler.kv_view import has_caught_up
from services.executor.scheduler.layerwise_scheduler import LayerwiseSchedulerMixin
from services.executor.scheduler.planner_client import PlannerClient
from services.executor.scheduler.scheduler_seam import SchedulerSeam
from services.executor.scheduler.step_watch import StepWatch
from services.executor.stats.kv_stats import KVStats
from services.executor.step_messages import StepFeedback
from services.kit import log
from services.placement.batch import SEALING_STEPS

STEPS_PER_STATS = 32


class ControlledSchedulerMixin(LayerwiseSchedulerMixin):
    """Tells the controller what happens, and calls it around each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if multiprocessing.parent_process() is not None:
            log.configure("executor-engine", "info")
        options = ControllerOptions.of(self.vllm_config)  # type: ignore[attr-defined]
        self._num_steps_unreported = 0
        self.set_up(options, make_planner(options))

    def set_up(self, options: ControllerOptions, planner: Planner | None) -> None:
        """Start with a controller that knows nothing. There may be no requests."""
        assert not self.requests  # type: ignore[attr-defined]
        self._seam = SchedulerSeam(self, options, time.monotonic)
        self.controller = Controller(options, self._seam, planner, time.monotonic)
        self._seam.ledger = self.controller.ledger
        self._watch = StepWatch()
        self._unmirrored: dict[str, None] = {}  # decode, and their host copy lags

    # -- each step ---------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        called_s = time.monotonic()
        self.controller.before_schedule()
        begin_s = time.monotonic()
        output = super().schedule(*args, **kwargs)
        end_s = time.monotonic()
        step = self._watch.scheduled(output, begin_s)
        self._seam.last_scheduled = tuple(output.num_scheduled_tokens)
        self.controller.ledger.scheduled(output.num_scheduled_tokens, begin_s)
        self._note_progress(output)
        self.controller.after_schedule(step)
        self.controller.spent(begin_s - called_s + time.monotonic() - end_s)
        return output

    def _note_progress(self, output: SchedulerOutput) -> None:
        """Tell the controller who was admitted, who begins to decode, whose copy is complete."""
        note = self.controller.note
        admitted = len(output.scheduled_new_reqs) + len(
            output.scheduled_cached_reqs.resumed_req_ids
        )
        note(*[Trigger.ADMITTED] * admitted)
        for request_id in list(self._watch.prefilling):
            request = self.requests[request_id]  # type: ignore[attr-defined]
            if request.num_computed_tokens >= request.num_tokens:
                self._watch.gone(request_id)
                self._unmirrored[request_id] = None
                note(Trigger.PREFILLED)
        for request_id in list(self._unmirrored):
            kv = self.block_owner.requests.get(request_id)
            if kv is None or not kv.mirrored:
                del self._unmirrored[request_id]
            elif has_caught_up(
                kv, block_size=self.block_owner.geometry.block_size, slack_blocks=SEALING_STEPS
            ):
                del self._unmirrored[request_id]
                note(Trigger.MIRRORED)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        result = super().update_from_output(scheduler_output, model_runner_output)
        connector_output = model_runner_output.kv_connector_output
        feedback = connector_output and connector_output.kv_connector_worker_meta
        timing = None
        if isinstance(feedback, StepFeedback):
            self._watch.ended(feedback)
            timing = feedback.timing
        self.controller.after_update(timing, busy=self.has_requests())  # type: ignore[attr-defined]
        self.predicted_step_s = self.controller.meter.predicted_step_s
        return result

    # -- a request's life --------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        waited_s = max(0.0, time.time() - request.arrival_time)
        self.controller.ledger.arrived(
            request.request_id, self.buffers[request.request_id], time.monotonic() - waited_s
        )

    def hold_back(self, request_id: str, *, held: bool) -> None:
        self.controller.hold(request_id, held=held)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._forget_progress(request.request_id)
        self.controller.ledger.preempted(request.request_id, time.monotonic())
        self.controller.note(Trigger.PREEMPTED)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        self._forget_progress(request.request_id)
        self.controller.ledger.gone(
            request.request_id,
            time.monotonic(),
            num_output_tokens=None if aborted else request.num_output_tokens,
        )
        self.controller.note(Trigger.ABORTED if aborted else Trigger.FINISHED)
        return super()._free_request(request, *args, **kwargs)

    def _forget_progress(self, request_id: str) -> None:
        self._watch.gone(request_id)
        self._unmirrored.pop(request_id, None)

    # -- figures -----------------------------------------------------------------------------

    def make_stats(
        self, spec: Any = None, kv_stats: KVConnectorStats | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Add the controller's counts once in a while: most steps change little."""
        self._num_steps_unreported += 1
        if self.log_stats and self._num_steps_unreported >= STEPS_PER_STATS:  # type: ignore[attr-defined]
            self._num_steps_unreported = 0
            own = KVStats(data={"controller": self.controller.counts.take()})
            kv_stats = own if kv_stats is None else kv_stats.aggregate(own)
        return super().make_stats(spec, kv_stats, *args, **kwargs)  # type: ignore[misc]

    def shutdown(self) -> None:
        self.controller.close()
        super().shutdown()  # type: ignore[misc]

    def check_integrity(self) -> None:
        """Raise AssertionError if the controller and vLLM differ about who is here."""
        super().check_integrity()
        known = self.controller.ledger.entries.keys()
        alive = self.requests.keys()  # type: ignore[attr-defined]
        assert known == alive, f"the controller's requests differ: {sorted(known ^ alive)}"


def make_planner(options: ControllerOptions) -> PlannerClient | None:
    """Return who is asked; None if the capacity guard decides, and nothing is compared."""
    acts = not is_decided_locally(options.policy, options.parameters)
    if not options.planner_address or not (acts or options.shadow_policy):
        return None
    return PlannerClient(
        options.planner_address,
        transport=options.transport,
        timeout_s=options.plan_timeout_s,
        acts=acts,
        shadow_policy=options.shadow_policy,
    )


class ControlledScheduler(ControlledSchedulerMixin, Scheduler):  # type: ignore[misc]
    """The synchronous one."""


class AsyncControlledScheduler(ControlledSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
    """The one that schedules a step ahead of the model."""
