"""The coordinator where some layer groups never leave the pool: `BlockOwner`'s come first."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.executor.blocks.sides.side_groups import SideGroups
from services.executor.scheduler.coordinator import LayerwiseCoordinator


class SideCoordinator(LayerwiseCoordinator):
    """Adds the side groups' blocks to what `BlockOwner` answers."""

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
