"""Blocks and slots that a hung copy may still write: they are not given out until it has ended."""

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.executor.blocks.host_pool import HostPool
from services.executor.blocks.pool_blocks import PoolBlocks


class Quarantine:
    """Holds a reference of its own to each block, so that giving it back does not free it."""

    def __init__(self, blocks: PoolBlocks, host: HostPool) -> None:
        self._pool_blocks, self._pool = blocks, blocks.pool
        self._host = host
        self._blocks: dict[int, KVCacheBlock] = {}
        self._slots: frozenset[int] = frozenset()

    def update(
        self, block_ids: frozenset[int], slots: frozenset[int]
    ) -> tuple[frozenset[int], frozenset[int]]:
        """Hold exactly these from now on, whoever has them now; return the blocks and the slots
        that were not held before.
        """
        if not (block_ids or slots or self._blocks or self._slots):
            return frozenset(), frozenset()
        new_blocks = block_ids - self._blocks.keys()
        if new_blocks:
            self._pool_blocks.forget_left(new_blocks)
        ended = [self._blocks.pop(block_id) for block_id in self._blocks.keys() - block_ids]
        self._pool.free_blocks(ended)
        for block_id in new_blocks:
            self._blocks[block_id] = self._pool.blocks[block_id]
        self._pool.touch([self._blocks[block_id] for block_id in new_blocks])
        new_slots, self._slots = slots - self._slots, slots
        self._host.quarantine(slots)
        return frozenset(new_blocks), new_slots

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def num_unowned_blocks(self) -> int:
        """Blocks that nothing but the quarantine holds."""
        return sum(block.ref_cnt == 1 for block in self._blocks.values())

    def num_references(self, block: KVCacheBlock) -> int:
        """Return how many references a block has besides its owner's: 0 or 1."""
        return int(block.block_id in self._blocks)
