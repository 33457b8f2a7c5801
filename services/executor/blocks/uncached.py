"""Uncached prefixes: leading KV that is not kept, and computed anew in each step (eLLM).

All layer groups share one scratch block per position: a step's layers run one after the other, and
of each the KV is there while that layer reads it. So a position that is dropped gives back the
blocks of all groups but one, and dropping never takes a block. A position that is kept again takes
blocks of its own, and the next step that the request is in computes it once more, into these.

A dropped position is in no save and in no load: only what has a complete host copy in every group
is dropped, or what shall have none; staging begins behind it.
"""

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.executor.blocks.pool_blocks import PoolBlocks
from services.executor.blocks.residency import RequestKV
from services.executor.blocks.staging import StagingBuffers
from services.executor.blocks.step_orders import StepOrders


class UncachedPrefixes:
    """Drops leading blocks of requests, and keeps them again."""

    def __init__(self, blocks: PoolBlocks, orders: StepOrders, staging: StagingBuffers) -> None:
        self.kvs: dict[RequestKV, None] = {}  # of which a step computes something anew
        self.num_dropped_blocks = 0  # given back, since the start
        self.num_kept_blocks = 0  # taken for positions that are kept again, since the start
        self._blocks, self._orders, self._staging = blocks, orders, staging

    @property
    def num_saved_blocks(self) -> int:
        """Return how many blocks more all requests would own if nothing were uncached."""
        return sum(kv.num_saved for kv in self.kvs)

    def set_length(self, kv: RequestKV, num_wanted: int, *, num_known: int) -> None:
        """Let a request's uncached prefix be `num_wanted` positions long from the next step on.

        It may be shorter: there are `num_known` tokens to compute it from. And it may be longer,
        where too few blocks are free to keep more. Nothing changes while layers are on their way
        back, while the request is asleep, or before a step has filled what was last kept again.
        """
        if kv.asleep or kv.retiring or kv.restoring:
            return
        num_now = len(kv.uncached)
        if num_wanted < num_now:
            self._keep(kv, num_wanted)
        else:
            num_most = min(num_wanted, kv.num_full_blocks, num_known // kv.block_size)
            if kv.mirrored:
                num_most = min(num_most, kv.num_host_blocks)
            if num_most > num_now:
                self._drop(kv, num_most)

    def settle(self, kv: RequestKV) -> None:
        """Take in that a step has computed anew what the request no longer drops."""
        self._blocks.release(kv.retiring)
        kv.retiring = []
        if not kv.uncached:
            del self.kvs[kv]

    def forget(self, kv: RequestKV) -> None:
        """Take in that a request's KV has ended; its scratch ends with its other blocks."""
        self.kvs.pop(kv, None)

    def _drop(self, kv: RequestKV, end: int) -> None:
        start, unused = len(kv.uncached), []
        for position in range(start, end):
            scratch, *others = _holders(kv, position)
            kv.uncached.append(scratch)
            unused.extend(others)
        self._show(kv, start)
        self.kvs[kv] = None
        self.num_dropped_blocks += len(unused)
        self._blocks.release(unused)

    def _show(self, kv: RequestKV, start: int) -> None:
        """Let rows and buffers show the scratch blocks from a position on."""
        end, new = len(kv.uncached), kv.uncached[start:]
        for number, buffer in enumerate(kv.staging):
            is_short = len(buffer) < end
            buffer[start:end] = new
            if is_short:
                ids = [block.block_id for block in buffer[start:]]
                self._orders.fill_staging(kv.request_id, number, start, ids)
        for index, group in enumerate(kv.groups):
            group.first = end
            group.row[start:end] = new
            for position in range(start, end):
                group.own.pop(position, None)
            if group.offloaded:
                self._staging.load_anew(kv, index)
            ids = [block.block_id for block in new]
            self._orders.edit_row((kv.request_id, index), start, ids)

    def _keep(self, kv: RequestKV, num_wanted: int) -> None:
        """Give as many positions blocks of their own as there are blocks for."""
        num_holders = len(kv.groups) - len(kv.offloaded) + len(kv.staging)
        end = len(kv.uncached)
        start = max(num_wanted, end - self._blocks.num_free // num_holders)
        if start >= end:
            return
        kv.retiring = kv.uncached[start:]
        del kv.uncached[start:]
        self.num_kept_blocks += num_holders * (end - start)
        for number, buffer in enumerate(kv.staging):
            buffer[start:end] = self._blocks.take(end - start)
            ids = [block.block_id for block in buffer[start:]]
            self._orders.fill_staging(kv.request_id, number, start, ids)
        for index, group in enumerate(kv.groups):
            group.first = start
            if group.offloaded:
                self._staging.stage(kv, index, range(start, end))
                continue
            new = self._blocks.take(end - start)
            group.row[start:end] = new
            ids = [block.block_id for block in new]
            self._orders.edit_row((kv.request_id, index), start, ids)


def _holders(kv: RequestKV, position: int) -> list[KVCacheBlock]:
    """Return the blocks that hold a position: of staging buffers, then of layer groups."""
    staged = [buffer[position] for buffer in kv.staging if position < len(buffer)]
    own = [
        group.own[position] if group.offloaded else group.row[position]
        for group in kv.groups
        if not group.offloaded or position in group.own
    ]
    return [*staged, *own]
