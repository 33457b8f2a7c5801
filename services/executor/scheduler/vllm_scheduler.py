"""vLLM's scheduler as ours see it: what they use of it, with types."""

from typing import TYPE_CHECKING, Any

NEVER = 1 << 60  # a step that does not come
IDLE_WAIT_S = 0.005  # between steps of a batch in which no request may run
COPY_WAIT_S = 0.0005  # between those in which none can until copies are complete

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request, RequestStatus

    class VllmScheduler:
        """Never made: at run time one of vLLM's two schedulers stands here."""

        vllm_config: Any
        requests: dict[str, Request]
        running: list[Request]
        waiting: Any
        kv_holding_waiting: Any
        kv_cache_manager: Any
        connector: Any
        deferred_frees: Any
        prev_step_scheduled_req_ids: set[str]
        max_model_len: int
        max_num_active_reqs: int
        max_num_scheduled_tokens: int
        num_spec_tokens: int
        block_size: int
        hash_block_size: int
        log_stats: bool
        needs_kv_cache_zeroing: bool
        pause_state: PauseState
        structured_output_manager: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def add_request(self, request: Request) -> None: ...
        def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput: ...
        def update_from_output(self, output: SchedulerOutput, *args: Any) -> Any: ...
        def has_requests(self) -> bool: ...
        def finish_requests(
            self, request_ids: Iterable[str], finished_status: RequestStatus
        ) -> list[Request]: ...
        def _preempt_request(
            self, request: Request, timestamp: float, drop_stale_output: bool = False
        ) -> None: ...
        def _handle_blocked_waiting_request(self, request: Request) -> bool: ...
        def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any: ...
        def make_stats(self, *args: Any, **kwargs: Any) -> Any: ...
        def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool: ...
        def shutdown(self) -> None: ...
else:
    VllmScheduler = object
