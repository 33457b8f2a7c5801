"""Layer-wise schedulers under `ellm`: part of KV is not kept, and computed anew in every step.

Named by `scheduler_cls` where the run policy may leave KV uncached. All others are untouched.
"""

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from services.executor.scheduler.scheduler import LayerwiseSchedulerMixin
from services.executor.scheduler.shadows import Shadows
from services.placement.types import RequestId


class EllmSchedulerMixin(LayerwiseSchedulerMixin):
    """Drops what the run policy says before a step, and computes it anew in the step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shadows = Shadows(self, self.block_owner)
        self.block_owner.trunks.is_on = False  # both claim what a request begins with

    def adjust_placements(self) -> None:
        self.shadows.uncache(self._wanted())
        super().adjust_placements()

    def _wanted(self) -> Mapping[RequestId, int]:
        decision = self.line.decision
        return {} if decision is None else decision.uncached_blocks

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        self.loop.meter.recomputes(self.shadows.add_to(output))
        return output


class EllmScheduler(EllmSchedulerMixin, Scheduler):  # type: ignore[misc]
    """The synchronous one."""


class AsyncEllmScheduler(EllmSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
    """The one that schedules a step ahead of the model."""
