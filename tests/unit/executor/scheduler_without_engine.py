"""`LayerwiseScheduler`'s own part, over a simulated scheduler in place of vLLM's."""

from types import SimpleNamespace
from typing import Any

from services.executor.scheduler.layerwise_scheduler import LayerwiseSchedulerMixin
from services.executor.stats.rates import Rates
from services.executor.stats.step_clock import StepClock
from tests.unit.executor.simulated_scheduler import SimulatedScheduler


class VllmScheduler:
    """What the mixins call of vLLM's scheduler."""

    def __init__(self, inner: SimulatedScheduler) -> None:
        self.inner = inner
        self.parking: list[str | None] = []  # what the coordinator was told, by preemption

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool) -> None:
        self.parking.append(self._coordinator.parking)  # type: ignore[attr-defined]

    def update_from_output(self, *args: Any) -> dict[int, Any]:
        return {}


class SchedulerWithoutEngine(LayerwiseSchedulerMixin, VllmScheduler):
    def __init__(self, inner: SimulatedScheduler) -> None:
        VllmScheduler.__init__(self, inner)
        self.capacity_guard = inner.capacity_guard
        self.control = inner.control
        self.requests = inner.requests
        self.buffers = {}
        self.rates = Rates()
        self.step_clock = StepClock()
        self._coordinator: Any = SimpleNamespace(parking=None)
