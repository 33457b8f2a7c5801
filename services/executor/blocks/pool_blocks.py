"""The pool's blocks, as they are taken and given back, and what is still in those that are free.

What ends *leaves* the blocks of its columns: they are free, and handed out after all others that
are free by then. Until then whoever comes back with the same KV takes them as they are, instead of
a copy. One request at a time: a block that is found is its finder's own.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.control.prefixes.prefix_cache import Column
from services.executor.blocks.step_orders import StepOrders

Position = Sequence[KVCacheBlock | None]  # a block position's block in each layer group, if any


class PoolBlocks:
    """vLLM's block pool; with poisoning on, blocks that end become NaN, in tests."""

    def __init__(
        self,
        pool: BlockPool,
        orders: StepOrders,
        on_lost: Callable[[Column], None],
        *,
        poison_freed: bool,
    ) -> None:
        """`on_lost`: told of columns that free blocks held, and do not hold any more."""
        self.pool, self._on_lost = pool, on_lost
        self._left: dict[int, Position] = {}  # by the KV's uid
        self._columns: dict[int, Column] = {}  # of those that are left in every layer group
        self._num_left: dict[int, int] = {}  # of these, how many blocks none has had since
        self._uids: dict[int, int] = {}  # what is in a block that none has had since, by its id
        self._orders = orders
        self._poison_freed = poison_freed
        self.notes_open = False  # whether the runner must clear blocks that fill one by one
        self._open: list[int] = []  # their ids, since they were last asked for

    @property
    def num_usable(self) -> int:
        return int(self.pool.num_gpu_blocks) - 1  # vLLM keeps one as the null block

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
        if self.notes_open:
            self._open.extend(block.block_id for block in blocks)
        return blocks

    def take_open_ids(self) -> list[int]:
        """Return the ids of blocks taken by `take_open` since the last call, if they are noted."""
        ids, self._open = self._open, []
        return ids

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

    @property
    def num_left(self) -> int:
        """Return how many free blocks hold KV that may be found."""
        return len(self._uids)

    def leave(self, positions: Iterable[tuple[Column, Position]]) -> None:
        """End the life of columns' blocks, whose KV may be found until others take them.

        The first are taken first. Steps in flight may still read and fill them; those that come
        follow them, and no copy writes them. What is in quarantine is not to be found, nor is part
        of a column that is nowhere else.
        """
        ended: list[KVCacheBlock] = []
        no_use: list[KVCacheBlock] = []
        for column, blocks in positions:
            uid = column.uid
            held = [block for block in blocks if block is not None]
            left = [block for block in held if block.ref_cnt == 1]
            if not column.is_complete and len(left) < len(blocks):
                left = []
            kept = {block.block_id for block in left}
            no_use.extend(block for block in held if block.block_id not in kept)
            if left:
                self._forget(uid)  # another's, of the same KV
                self._left[uid], self._num_left[uid] = blocks, len(left)
                if len(left) == len(blocks):
                    self._columns[uid], column.is_left = column, True
                self._uids.update((block.block_id, uid) for block in left)
                ended.extend(left)
        self.release(no_use)
        self.pool.unpin_blocks(ended, self._on_reuse)

    def find(self, uids: Sequence[int], group: int) -> list[KVCacheBlock | None]:
        """Take a layer group's blocks that still hold this KV; None for those that are gone."""
        found: list[KVCacheBlock | None] = []
        for uid in uids:
            blocks = self._left.get(uid)
            block = blocks[group] if blocks is not None else None
            if block is not None and self._uids.get(block.block_id) == uid:
                self._lose(block.block_id)
                found.append(block)
            else:
                found.append(None)
        self.pool.touch([block for block in found if block is not None])
        return found

    def find_all(self, uids: Sequence[int], group: int) -> list[KVCacheBlock]:
        """Take a layer group's blocks of columns that are left."""
        found = [block for block in self.find(uids, group) if block is not None]
        assert len(found) == len(uids), "a column is not left"
        return found

    def num_to_find(self, uids: Iterable[int], groups: Collection[int]) -> int:
        """Return how many blocks `find` would, of several layer groups together."""
        return sum(self._num_to_find(uid, groups) for uid in uids if uid in self._left)

    def _num_to_find(self, uid: int, groups: Collection[int]) -> int:
        blocks = self._left[uid]
        if len(groups) == len(blocks):
            return self._num_left[uid]
        wanted = (blocks[group] for group in groups)
        return sum(b is not None and self._uids.get(b.block_id) == uid for b in wanted)

    def forget_left(self, block_ids: Collection[int] | None = None) -> None:
        """Let none find what free blocks hold: all of them, or these and what is beside them."""
        if block_ids is None:
            uids = set(self._left)
        else:
            uids = {self._uids[block_id] for block_id in block_ids if block_id in self._uids}
        for uid in uids:
            self._forget(uid)

    def _forget(self, uid: int) -> None:
        if uid in self._left:
            gone = [b for b in self._left[uid] if b and self._uids.get(b.block_id) == uid]
            for block in gone:
                self._lose(block.block_id)
            self.poison(gone)

    def _on_reuse(self, block: KVCacheBlock) -> None:
        """The pool hands a block out that was left, if it was not found meanwhile."""
        if block.block_id in self._uids:
            self._lose(block.block_id)
            self.poison([block])

    def _lose(self, block_id: int) -> None:
        uid = self._uids.pop(block_id)
        if (column := self._columns.pop(uid, None)) is not None:
            column.is_left = False
            self._on_lost(column)
        self._num_left[uid] -= 1
        if not self._num_left[uid]:
            del self._left[uid], self._num_left[uid]

    def check_integrity(self) -> None:
        """Assert that what may be found is free, and each block one thing's."""
        left = [
            block
            for uid, blocks in self._left.items()
            for block in blocks
            if block is not None and self._uids.get(block.block_id) == uid
        ]
        assert len({block.block_id for block in left}) == len(left) == self.num_left
        assert sum(self._num_left.values()) == self.num_left
        assert self._num_left.keys() == self._left.keys() == set(self._uids.values())
        assert all(block.ref_cnt == 0 for block in left), "a block that was left is not free"
        whole = {uid for uid, blocks in self._left.items() if self._num_left[uid] == len(blocks)}
        assert whole == self._columns.keys()
        assert all(column.is_left for column in self._columns.values())
