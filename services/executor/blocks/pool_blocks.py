"""The pool's blocks, as they are taken and given back."""

from collections.abc import Iterable, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.executor.blocks.step_orders import StepOrders


class PoolBlocks:
    """vLLM's block pool; with poisoning on, blocks that end become NaN, in tests."""

    def __init__(self, pool: BlockPool, orders: StepOrders, *, poison_freed: bool) -> None:
        self.pool = pool
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
