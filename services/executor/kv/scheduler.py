"""vLLM's schedulers, knowing what each request was promised and how far its reader is.

Named by `scheduler_cls`, so that this module is imported in the EngineCore process. vLLM picks
between a synchronous and an asynchronous scheduler; there is one of ours for each.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from services.executor.kv.parent_watch import end_with_parent
from services.executor.kv.reader_state import ReaderStateMixin


class EvenflowSchedulerMixin(ReaderStateMixin):
    """Keeps a buffer per request from its arrival to its end; schedules as vLLM does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        end_with_parent()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every buffer belongs to a request that vLLM still has."""
        left_over = self.buffers.keys() - self.requests.keys()  # type: ignore[attr-defined]
        assert not left_over, f"buffers of requests that are gone: {sorted(left_over)}"


class EvenflowScheduler(EvenflowSchedulerMixin, Scheduler):  # type: ignore[misc]
    """The synchronous one."""


class EvenflowAsyncScheduler(EvenflowSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
    """The one that schedules a step ahead of the model."""
