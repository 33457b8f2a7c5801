"""`LayerwiseScheduler`'s own part, over a simulated scheduler in place of vLLM's."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from services.control.step_clock import StepClock
from services.executor.scheduler.scheduler import LayerwiseSchedulerMixin
from services.pacing.step_times import StepTimes
from tests.unit.executor.simulated_scheduler import SimulatedScheduler


class VllmScheduler:
    """What the mixins call of vLLM's scheduler."""

    def __init__(self, inner: SimulatedScheduler) -> None:
        self.inner = inner
        self.kept: list[str | None] = []  # who keeps host copies, by preemption
        self._keeps: str | None = None

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool) -> None:
        self.kept.append(self._keeps)

    def update_from_output(self, *args: Any) -> dict[int, Any]:
        return {}

    @contextmanager
    def keeping(self, request_id: str | None) -> Iterator[None]:
        self._keeps = request_id
        yield
        self._keeps = None


class SchedulerWithoutEngine(LayerwiseSchedulerMixin, VllmScheduler):
    def __init__(self, inner: SimulatedScheduler) -> None:
        VllmScheduler.__init__(self, inner)
        self.capacity_guard = inner.capacity_guard
        self.control = inner.control
        self.requests = inner.requests
        self.records = inner.records
        self.block_owner = inner.block_owner
        self.step_clock = StepClock()
        self._step_times = StepTimes()
        self.loop = Mock()  # nobody measures or asks
        self._coordinator: Any = SimpleNamespace(keeping=self.keeping)
