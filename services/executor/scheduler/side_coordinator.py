"""The coordinator where some layer groups never leave the pool: `BlockOwner`'s come first."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import structlog
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, get_request_block_hasher
from vllm.v1.request import Request

from services.executor.blocks.sides.side_groups import SideGroups
from services.executor.blocks.transfers.turn_ends import TurnEnds
from services.executor.scheduler.coordinator import LayerwiseCoordinator
from services.placement.blocks import STATE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = structlog.get_logger()


class SideCoordinator(LayerwiseCoordinator):
    """Adds the side groups' blocks to what `BlockOwner` answers."""

    turn_ends: TurnEnds
    hash_blocks: Callable[[Request], list[BlockHash]]

    def begin(self, turn_ends: TurnEnds, config: "VllmConfig") -> None:
        """Let prefixes be found where requests ended: elsewhere windows and states are lacking.

        vLLM hashes as many tokens at once as all groups' blocks have in common, and a state's are
        as many as a request may have.
        """
        windows = self.owner.geometry.side_windows
        self.turn_ends, self.owner.trunks.is_on = turn_ends, False
        algorithm = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        self.hash_blocks = get_request_block_hasher(self.owner.geometry.block_size, algorithm)
        log.info(
            "side_groups",
            windows=sum(window != STATE for window in windows),
            states=windows.count(STATE),
            offloadable=self.owner.geometry.num_groups,
            effect="prefixes are not shared in the pool, preempted requests are computed again",
        )

    def arrives(self, request: Request) -> None:
        self.turn_ends.drop([request.request_id])  # another one of that name
        if request._block_hasher is not None:
            request._block_hasher, request.block_hashes = self.hash_blocks, []
            request.update_block_hashes()

    def ends(self, request: Request) -> None:
        record = self.owner.records[request.request_id]
        self.turn_ends.end(record, request.all_token_ids)

    @property
    def sides(self) -> SideGroups:
        return self.owner.sides

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        *args: Any,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        num_new = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, *args, **kwargs
        )
        if apply_admission_cap:  # for all of its tokens, of which a step computes a part
            return num_new + self.sides.num_to_come(request_id, num_tokens=num_tokens)
        return num_new + self.sides.num_new(request_id, num_tokens=num_tokens)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> tuple[list[KVCacheBlock], ...]:
        gained = super().allocate_new_blocks(request_id, num_tokens, *args, **kwargs)
        if gained is self._nothing:
            if not self.sides.num_new(request_id, num_tokens=num_tokens):
                return gained
            gained = gained[: self.owner.geometry.num_groups]
        return (*gained, *self.sides.grow(request_id, num_tokens=num_tokens))

    def get_blocks(self, request_id: str) -> tuple[list[KVCacheBlock], ...]:
        rows = super().get_blocks(request_id)
        return rows if rows is self._nothing else (*rows, *self.sides.rows(request_id))

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, *args: Any, **kwargs: Any
    ) -> None:
        self.sides.slide(request_id, num_tokens=processed_computed_tokens)
