"""The requests of a scheduler of vLLM's, as `Engine` has them."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from services.control.requests.request_record import RequestRecord
from services.executor.blocks.residency import RequestKV
from services.executor.scheduler.vllm_scheduler import VllmScheduler


class EngineRequests:
    """Reads the scheduler's queues."""

    def __init__(
        self, scheduler: VllmScheduler, records: Mapping[str, RequestRecord[RequestKV]]
    ) -> None:
        """`records`: of all live requests."""
        self._scheduler, self._records = scheduler, records

    @property
    def records(self) -> Mapping[str, RequestRecord[RequestKV]]:
        return self._records

    @property
    def running(self) -> Sequence[Request]:
        return self._scheduler.running

    @property
    def waiting(self) -> Sequence[Request]:
        waiting: Sequence[Request] = self._scheduler.waiting
        return waiting

    @property
    def wants_all(self) -> bool:
        """Whether requests wait, or the engine is to rest: there is no time for anything else."""
        return bool(self.waiting) or self._scheduler.pause_state is not PauseState.UNPAUSED

    @property
    def live(self) -> Iterable[Request]:
        scheduler = self._scheduler
        return chain(scheduler.running, scheduler.kv_holding_waiting, scheduler.waiting)

    @property
    def num_places(self) -> int:
        return max(0, self._scheduler.max_num_active_reqs - len(self._scheduler.running))


def told_length(request: Request) -> int | None:
    """Return how many tokens an answer has, for what others will have. None of one that was broken
    off; 0, which says nothing of those, of one that may have one token only.
    """
    if request.status == RequestStatus.FINISHED_ABORTED:
        return None
    return 0 if request.max_tokens == 1 else int(request.num_output_tokens)
