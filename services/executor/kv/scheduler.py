"""vLLM's schedulers, knowing what each request was promised.

Named by `scheduler_cls`, so that this module is imported in the EngineCore process. vLLM picks
between a synchronous and an asynchronous scheduler; there is one of ours for each.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from services.executor.kv.parent_watch import end_with_parent
from services.executor.service_level import RequestTag, from_extra_args


class EvenflowSchedulerMixin:
    """Keeps a tag per request from its arrival to its end; schedules as vLLM does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.request_tags: dict[str, RequestTag] = {}
        end_with_parent()

    def add_request(self, request: Request) -> None:
        super().add_request(request)  # type: ignore[misc]
        params = request.sampling_params
        self.request_tags[request.request_id] = from_extra_args(params and params.extra_args)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.request_tags.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every tag belongs to a request that vLLM still has."""
        left_over = self.request_tags.keys() - self.requests.keys()  # type: ignore[attr-defined]
        assert not left_over, f"tags of requests that are gone: {sorted(left_over)}"


class EvenflowScheduler(EvenflowSchedulerMixin, Scheduler):  # type: ignore[misc]
    """The synchronous one."""


class EvenflowAsyncScheduler(EvenflowSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
    """The one that schedules a step ahead of the model."""
