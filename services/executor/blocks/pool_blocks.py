"""The pool's blocks, as they are taken and given back, and what is still in those that are free.

What ends *leaves* the blocks that are complete on the host: they are free, and handed out after all
others that are free by then. Until then whoever comes back with the same KV takes them as they are,
instead of a copy. One request at a time: a block that is found is its finder's own.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import partial

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.executor.blocks.step_orders import StepOrders

Position = list[KVCacheBlock | None]  # a block position's block in each layer group, if it has one


class PoolBlocks:
    """vLLM's block pool; with poisoning on, blocks that end become NaN, in tests."""

    def __init__(self, pool: BlockPool, orders: StepOrders, *, poison_freed: bool) -> None:
        self.pool = pool
        self.num_left = 0  # free blocks whose KV may be found
        self._left: dict[int, Position] = {}  # by the KV's uid
        self._orders = orders
        self._poison_freed = poison_freed

    @property
    def num_free(self) -> int:
        return int(self.pool.get_num_free_blocks())

    @property
    def null(self) -> KVCacheBlock:
        """Stands in rows for KV that is nowhere in the pool."""
        return self.pool.null_block

    def take(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks that are filled before anybody reads them. There must be enough."""
        blocks: list[KVCacheBlock] = self.pool.get_new_blocks(num_blocks)
        return blocks

    def take_open(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks that new tokens fill one by one."""
        blocks = self.take(num_blocks)
        if self._poison_freed:
            self._orders.clear(block.block_id for block in blocks)
        return blocks

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """End the life of blocks."""
        if blocks:
            self.poison(blocks)
            self.pool.free_blocks(blocks)

    def poison(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Mark blocks that the caller gives to the pool itself."""
        if self._poison_freed:
            self._orders.poison(block.block_id for block in blocks)

    # -- what free blocks still hold --------------------------------------------------------

    def leave(self, uid: int, blocks: Position) -> None:
        """End the life of a position's blocks, whose KV may be found until others take them.

        Steps in flight may still read them, and no step or copy writes them any more.
        """
        left = [None if block is None or block.ref_cnt > 1 else block for block in blocks]
        # What is in quarantine, too, is nobody's to find.
        self.release([b for b in blocks if b is not None and b.ref_cnt > 1])
        ended = [block for block in left if block is not None]
        if ended:
            self._forget(uid)  # another's, of the same KV
            self._left[uid] = left
            self.num_left += len(ended)
            self.pool.unpin_blocks(ended, partial(self._on_reuse, uid))

    def find(self, uids: Sequence[int], group: int) -> list[KVCacheBlock | None]:
        """Take a layer group's blocks that still hold this KV; None for those that are gone."""
        found: list[KVCacheBlock | None] = []
        for uid in uids:
            position = self._left.get(uid)
            block = None if position is None else position[group]
            if block is not None:
                self._lose(uid, group)
            found.append(block)
        self.pool.touch([block for block in found if block is not None])
        return found

    def num_to_find(self, uids: Iterable[int], groups: Collection[int]) -> int:
        """Return how many blocks `find` would, of several layer groups together."""
        if not self._left:
            return 0
        positions = (self._left.get(uid) for uid in uids)
        return sum(
            position[group] is not None
            for position in positions
            if position is not None
            for group in groups
        )

    def forget_left(self, block_ids: Collection[int] | None = None) -> None:
        """Let nobody find what free blocks hold: all of them, or these."""
        for uid, position in list(self._left.items()):
            if block_ids is None or any(
                b is not None and b.block_id in block_ids for b in position
            ):
                self._forget(uid)

    def _forget(self, uid: int) -> None:
        position = self._left.pop(uid, None)
        if position is not None:
            gone = [block for block in position if block is not None]
            self.num_left -= len(gone)
            self.poison(gone)

    def _on_reuse(self, uid: int, block: KVCacheBlock) -> None:
        """The pool hands a block out that was left, if it was not found meanwhile."""
        position = self._left.get(uid, [])
        for group, left in enumerate(position):
            if left is block:
                self._lose(uid, group)
                self.poison([block])
                return

    def _lose(self, uid: int, group: int) -> None:
        position = self._left[uid]
        position[group] = None
        self.num_left -= 1
        if not any(position):
            del self._left[uid]

    def check_integrity(self) -> None:
        """Assert that what may be found is free, and each block one thing's."""
        left = [b for position in self._left.values() for b in position if b is not None]
        assert len({block.block_id for block in left}) == len(left) == self.num_left
        assert all(block.ref_cnt == 0 for block in left), "a block that was left is not free"
