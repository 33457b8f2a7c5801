"""vLLM's KV cache coordinator, answering from `BlockOwner`.

All layer groups have the same geometry and rows of the same length, so that one question per
request replaces one per group; most steps of a decode need no block at all and end at the first
comparison.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinatorNoPrefixCache
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from services.control.requests.request_record import RequestRecord
from services.executor.blocks.block_owner import BlockOwner
from services.executor.blocks.residency import RequestKV

# Returns a draft of a request that asks for its first blocks, given the tokens to make room for.
Draft = Callable[[RequestRecord[RequestKV], int], RequestKV]
# Returns how many of a request's tokens after a step cannot be rejected any more, of so many.
NumAccepted = Callable[[str, int], int]


class NoBlocks(KVCacheBlocks):  # type: ignore[misc]
    """What most requests of a decode step get, without a look at every group."""

    def get_block_ids(self, allow_none: bool = False, **kwargs: Any) -> Any:
        return None if allow_none else super().get_block_ids(**kwargs)


class LayerwiseCoordinator(KVCacheCoordinatorNoPrefixCache):  # type: ignore[misc]
    """Sits where vLLM asks for blocks; keeps no state but drafts of requests not yet admitted."""

    owner: BlockOwner
    draft: Draft
    num_accepted: NumAccepted

    @classmethod
    def install(
        cls, manager: KVCacheManager, *, max_in_flight_tokens: int
    ) -> "LayerwiseCoordinator":
        """Replace a manager's coordinator and block pool; nothing may be allocated yet."""
        old = manager.coordinator
        coordinator = cls(
            manager.kv_cache_config,
            manager.max_model_len,
            max_in_flight_tokens,
            False,
            manager.enable_kv_cache_events,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=old.scheduler_block_size,
            hash_block_size=old.block_pool.hash_block_size,
            metrics_collector=manager.metrics_collector,
        )
        manager.coordinator = coordinator
        manager.block_pool = coordinator.block_pool
        manager.empty_kv_cache_blocks = NoBlocks(manager.empty_kv_cache_blocks.blocks)
        return coordinator

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._block_size = self.single_type_managers[0].block_size
        self._nothing: tuple[list[KVCacheBlock], ...] = tuple([] for _ in self.single_type_managers)
        self.drafts: list[RequestKV] = []
        self._kept: str | None = None  # the request that keeps its host copies when freed

    @contextmanager
    def keeping(self, request_id: str | None) -> Iterator[None]:
        """Leave a request, or none, its host copies when it is freed meanwhile."""
        self._kept = request_id
        try:
            yield
        finally:
            self._kept = None

    def discard_drafts(self) -> None:
        """Forget requests that were looked at and not admitted; they are drafted anew."""
        for request in self.drafts:
            self.owner.discard(request)
        self.drafts.clear()

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        *args: Any,
        num_tokens_main_model: int,
        **kwargs: Any,
    ) -> int:
        request = self._kv(request_id)
        if request is None:
            request = self._drafted(request_id, num_tokens)
        elif num_tokens <= request.num_rows * self._block_size:
            return 0
        num_accepted = self.num_accepted(request_id, num_tokens_main_model)
        return self.owner.growth.num_new_blocks(
            request, num_tokens=num_tokens, num_accepted=num_accepted
        )

    def allocate_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        num_tokens_main_model: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[KVCacheBlock], ...]:
        request = self._kv(request_id)
        if request is None:
            request = self._drafted(request_id, num_tokens)
            self.drafts.remove(request)
            self.owner.adopt(request)
        elif num_tokens <= request.num_rows * self._block_size:
            return self._nothing
        num_accepted = self.num_accepted(request_id, num_tokens_main_model)
        return self.owner.growth.grow(request, num_tokens=num_tokens, num_accepted=num_accepted)

    def _kv(self, request_id: str) -> RequestKV | None:
        return self.owner.records[request_id].kv

    def _drafted(self, request_id: str, num_tokens: int) -> RequestKV:
        record = self.owner.records[request_id]
        drafted = next((one for one in self.drafts if one.record is record), None)
        if drafted is None:
            drafted = self.draft(record, num_tokens)
            self.drafts.append(drafted)
        return drafted

    def get_blocks(self, request_id: str) -> tuple[list[KVCacheBlock], ...]:
        request = self._kv(request_id)
        if request is None:
            return self._nothing
        return request.shown_rows()

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        request = self._kv(request_id)
        if request is None:
            return []
        return (self.owner.park if request_id == self._kept else self.owner.pop)(request)

    def arrives(self, request: Request) -> None:
        """Take in that a request comes, before the scheduler knows it."""

    def ends(self, request: Request) -> None:
        """Take in that a request ends, before its blocks are freed."""

    def free(self, request_id: str) -> None:
        self.block_pool.free_blocks(reversed(self.pop_blocks_for_free(request_id)))

    def allocate_new_computed_blocks(self, *args: Any, **kwargs: Any) -> None:
        """A request that comes back has its blocks already."""

    # vLLM calls these for every request in every step, or for features that are off here.

    def remove_skipped_blocks(self, *args: Any, **kwargs: Any) -> None:
        pass

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        pass

    def new_step_starts(self) -> None:
        pass
