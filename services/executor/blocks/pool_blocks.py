"""The pool's blocks, as they are taken and given back, and what is still in those that are free.

What ends *leaves* the blocks of its columns, and of its anchor: they are free, and handed out after
all others that are free by then. Until then whoever comes back with the same KV takes them as they
are, instead of a copy. One request at a time: a block that is found is its finder's own.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.control.prefixes.anchors import Anchor
from services.control.prefixes.prefix_cache import Column, PrefixCache
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
        # By what is in them: a column's uid, or an anchor.
        self._left: dict[Hashable, Position] = {}
        self._columns: dict[Hashable, Column] = {}  # of those that are left in every layer group
        self._num_left: dict[Hashable, int] = {}  # of these, how many blocks none has had since
        self._held: dict[int, Hashable] = {}  # in a block that none has had since, by its id
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
        return len(self._held)

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
            left = _in_no_quarantine(blocks)
            num_left = sum(block is not None for block in left)
            if num_left < len(blocks):
                if not column.is_complete:
                    left, num_left = [None] * len(blocks), 0
                no_use.extend(_those_not_in(left, blocks))
            if num_left:
                self._put_left(uid, left)
                if self._num_left[uid] == len(blocks):
                    self._columns[uid], column.is_left = column, True
                ended.extend(block for block in left if block is not None)
        self.release(no_use)
        self.pool.unpin_blocks(ended, self._on_reuse)

    def leave_anchor(self, anchor: Anchor, blocks: Sequence[KVCacheBlock]) -> None:
        """The same of what an anchor has beside columns, in the order of its slots."""
        left = _in_no_quarantine(blocks)
        self.release(_those_not_in(left, blocks))
        if ended := [block for block in left if block is not None]:
            self._put_left(anchor, left)
            self.pool.unpin_blocks(ended, self._on_reuse)

    def _put_left(self, key: Hashable, blocks: Position) -> None:
        """Let blocks be found; those that others have left of the same KV and group are not."""
        if key in self._left:
            pairs = list(zip(self._left[key], blocks, strict=True))
            kept = [old if new is None and self._holds(old, key) else None for old, new in pairs]
            self._forget(key, but={block.block_id for block in kept if block is not None})
            blocks = [new or old for (_, new), old in zip(pairs, kept, strict=True)]
        self._left[key], ids = blocks, [block.block_id for block in blocks if block is not None]
        self._num_left[key] = len(ids)
        self._held.update(dict.fromkeys(ids, key))

    def _holds(self, block: KVCacheBlock | None, key: Hashable) -> bool:
        return block is not None and self._held.get(block.block_id) == key

    def find(self, uids: Sequence[int], group: int) -> list[KVCacheBlock | None]:
        """Take a layer group's blocks that still hold this KV; None for those that are gone."""
        found: list[KVCacheBlock | None] = []
        for uid in uids:
            blocks = self._left.get(uid)
            found.append(self._find(uid, None if blocks is None else blocks[group]))
        self.pool.touch([block for block in found if block is not None])
        return found

    def find_anchor(self, anchor: Anchor) -> list[KVCacheBlock | None]:
        """Take what is still there of an anchor, in the order of its slots; None for the rest."""
        blocks = self._left.get(anchor, [None] * len(anchor.slots))
        found = [self._find(anchor, block) for block in blocks]
        self.pool.touch([block for block in found if block is not None])
        return found

    def _find(self, key: Hashable, block: KVCacheBlock | None) -> KVCacheBlock | None:
        if block is None or not self._holds(block, key):
            return None
        self._lose(block.block_id)
        return block

    def find_all(self, uids: Sequence[int], group: int) -> list[KVCacheBlock]:
        """Take a layer group's blocks of columns that are left."""
        found = [block for block in self.find(uids, group) if block is not None]
        assert len(found) == len(uids), "a column is not left"
        return found

    def num_to_find(self, uids: Iterable[int], groups: Collection[int]) -> int:
        """Return how many blocks `find` would, of several layer groups together."""
        return sum(self._num_to_find(uid, groups) for uid in uids if uid in self._left)

    def num_left_of(self, anchor: Anchor) -> int:
        """Return how many blocks `find_anchor` would."""
        return self._num_left.get(anchor, 0)

    def _num_to_find(self, uid: int, groups: Collection[int]) -> int:
        blocks = self._left[uid]
        if len(groups) == len(blocks):
            return self._num_left[uid]
        wanted = (blocks[group] for group in groups)
        return sum(self._holds(block, uid) for block in wanted)

    def oldest(self) -> Iterator[tuple[Column | None, int]]:
        """Yield what is left, as others take it: how many blocks, and the column if it is whole."""
        for key, num_left in self._num_left.items():
            yield self._columns.get(key), num_left

    def leave_anew(self, columns: Sequence[Column]) -> None:
        """Let others take whole columns that are left, and on the host, behind all else."""
        if columns:
            uids = [column.uid for column in columns]
            groups = range(len(self._left[uids[0]]))
            found = [self.find_all(uids, group) for group in groups]
            self.leave(zip(columns, zip(*found, strict=True), strict=True))

    def forget_left(self, block_ids: Collection[int] | None = None) -> None:
        """Let none find what free blocks hold: all of them, or these and what is beside them."""
        if block_ids is None:
            keys = set(self._left)
        else:
            keys = {self._held[block_id] for block_id in block_ids if block_id in self._held}
        for key in keys:
            self._forget(key)

    def _forget(self, key: Hashable, *, but: Collection[int] = ()) -> None:
        """`but`: ids of blocks that are found still."""
        blocks = [block for block in self._left.get(key, ()) if block is not None]
        gone = [b for b in blocks if self._holds(b, key) and b.block_id not in but]
        for block in gone:
            self._lose(block.block_id)
        self.poison(gone)

    def _on_reuse(self, block: KVCacheBlock) -> None:
        """The pool hands a block out that was left, if it was not found meanwhile."""
        if block.block_id in self._held:
            self._lose(block.block_id)
            self.poison([block])

    def _lose(self, block_id: int) -> None:
        key = self._held.pop(block_id)
        if (column := self._columns.pop(key, None)) is not None:
            column.is_left = False
            self._on_lost(column)
        self._num_left[key] -= 1
        if not self._num_left[key]:
            del self._left[key], self._num_left[key]

    def check_integrity(self) -> None:
        """Assert that what may be found is free, and each block one thing's."""
        left = [
            block
            for key, blocks in self._left.items()
            for block in blocks
            if block is not None and self._holds(block, key)
        ]
        assert len({block.block_id for block in left}) == len(left) == self.num_left
        assert sum(self._num_left.values()) == self.num_left
        assert self._num_left.keys() == self._left.keys() == set(self._held.values())
        assert all(block.ref_cnt == 0 for block in left), "a block that was left is not free"
        whole = {key for key, blocks in self._left.items() if self._num_left[key] == len(blocks)}
        assert self._columns.keys() == {key for key in whole if not isinstance(key, Anchor)}
        assert all(column.is_left for column in self._columns.values())


def leave_known(
    blocks: PoolBlocks,
    cache: PrefixCache,
    columns: Sequence[Column],
    owned: Sequence[Sequence[KVCacheBlock]],
) -> None:
    """Leave the blocks of columns, by layer group and column, that others may find, the last ones
    to be taken first; release those of columns that are forgotten.
    """
    positions = list(zip(columns, zip(*owned, strict=True), strict=True))
    known = [pair for pair in positions if cache.get(pair[0].key) is pair[0]]
    gone = [pair for pair in positions if cache.get(pair[0].key) is not pair[0]]
    blocks.leave(reversed(known))
    blocks.release([block for _, group in gone for block in group])


def _in_no_quarantine(blocks: Position) -> list[KVCacheBlock | None]:
    return [block if block is not None and block.ref_cnt == 1 else None for block in blocks]


def _those_not_in(left: Position, blocks: Position) -> list[KVCacheBlock]:
    """Return blocks at whose place nothing is left."""
    pairs = zip(left, blocks, strict=True)
    return [block for one, block in pairs if one is None and block is not None]
