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
        self.requests: dict[RequestKV, None] = {}  # of which a step computes something anew
        self.num_dropped_blocks = 0  # given back, since the start
        self.num_kept_blocks = 0  # taken for positions that are kept again, since the start
        self._blocks, self._orders, self._staging = blocks, orders, staging

    @property
    def num_saved_blocks(self) -> int:
        """Return how many blocks more all requests would own if nothing were uncached."""
        return sum(request.num_saved for request in self.requests)

    def set_length(self, request: RequestKV, num_wanted: int, *, num_known: int) -> None:
        """Let a request's uncached prefix be so many positions long from the next step on.

        It may be shorter: there are `num_known` tokens to compute it from. And it may be longer,
        where too few blocks are free to keep more. Nothing changes while layers are on their way
        back, while the request is asleep, or before a step has filled what was last kept again.
        """
        if request.asleep or request.retiring or request.restoring:
            return
        num_now = len(request.uncached)
        if num_wanted < num_now:
            self._keep(request, num_wanted)
        else:
            num_most = min(num_wanted, request.num_full_blocks, num_known // request.block_size)
            if request.mirrored:
                num_most = min(num_most, request.num_host_blocks)
            if num_most > num_now:
                self._drop(request, num_most)

    def settle(self, request: RequestKV) -> None:
        """Take in that a step has computed anew what the request no longer drops."""
        self._blocks.release(request.retiring)
        request.retiring = []
        if not request.uncached:
            del self.requests[request]

    def forget(self, request: RequestKV) -> None:
        """Take in that a request's KV has ended; its scratch ends with its other blocks."""
        self.requests.pop(request, None)

    def _drop(self, request: RequestKV, end: int) -> None:
        start, unused = len(request.uncached), []
        for position in range(start, end):
            scratch, *others = _holders(request, position)
            request.uncached.append(scratch)
            unused.extend(others)
        self._show(request, start)
        self.requests[request] = None
        self.num_dropped_blocks += len(unused)
        self._blocks.release(unused)

    def _show(self, request: RequestKV, start: int) -> None:
        """Let rows and buffers show the scratch blocks from a position on."""
        end, new = len(request.uncached), request.uncached[start:]
        for number, buffer in enumerate(request.staging):
            is_short = len(buffer) < end
            buffer[start:end] = new
            if is_short:
                ids = [block.block_id for block in buffer[start:]]
                self._orders.fill_staging(request.request_id, number, start, ids)
        for index, group in enumerate(request.groups):
            group.num_uncached = end
            group.row[start:end] = new
            for position in range(start, end):
                group.own.pop(position, None)
            if group.offloaded:
                self._staging.load_anew(request, index)
            ids = [block.block_id for block in new]
            self._orders.edit_row((request.request_id, index), start, ids)

    def _keep(self, request: RequestKV, num_wanted: int) -> None:
        """Give as many positions blocks of their own as there are blocks for."""
        num_holders = len(request.groups) - len(request.offloaded) + len(request.staging)
        end = len(request.uncached)
        start = max(num_wanted, end - self._blocks.num_free // num_holders)
        if start >= end:
            return
        request.retiring = request.uncached[start:]
        del request.uncached[start:]
        self.num_kept_blocks += num_holders * (end - start)
        for number, buffer in enumerate(request.staging):
            buffer[start:end] = self._blocks.take(end - start)
            ids = [block.block_id for block in buffer[start:]]
            self._orders.fill_staging(request.request_id, number, start, ids)
        for index, group in enumerate(request.groups):
            group.num_uncached = start
            if group.offloaded:
                self._staging.stage(request, index, range(start, end))
                continue
            new = self._blocks.take(end - start)
            group.row[start:end] = new
            ids = [block.block_id for block in new]
            self._orders.edit_row((request.request_id, index), start, ids)


def _holders(request: RequestKV, position: int) -> list[KVCacheBlock]:
    """Return the blocks that hold a position: of staging buffers, then of layer groups."""
    staged = [buffer[position] for buffer in request.staging if position < len(buffer)]
    own = [
        group.own[position] if group.offloaded else group.row[position]
        for group in request.groups
        if not group.offloaded or position in group.own
    ]
    return [*staged, *own]
