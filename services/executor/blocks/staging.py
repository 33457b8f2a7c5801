"""Staging buffers: pool blocks that a request's offloaded groups take turns in."""

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.executor.blocks.pool_blocks import PoolBlocks
from services.executor.blocks.residency import RequestKV
from services.executor.blocks.step_orders import StepOrders


class StagingBuffers:
    """Gives offloaded groups their buffers, and takes blocks for them and back."""

    def __init__(self, blocks: PoolBlocks, orders: StepOrders) -> None:
        self._blocks = blocks
        self._orders = orders

    def set_number(self, request: RequestKV, num_staging: int) -> None:
        """Ask for a number of staging buffers; there may be fewer for want of blocks."""
        if request.wanted_staging != num_staging:
            request.wanted_staging = num_staging
            self.assign(request)

    def assign(self, request: RequestKV) -> None:
        """Give offloaded groups their buffers in turns, after the set of them has changed."""
        if request.asleep:
            return
        chain = request.offloaded
        num_before = len(request.staging)
        num_wanted = min(request.wanted_staging, len(chain))
        dropped = []
        if not request.staging:
            for _ in range(num_wanted):
                self._begin_buffer(request)
        elif len(request.staging) > num_wanted:
            dropped = _blocks_of(request, first=num_wanted)
            del request.staging[num_wanted:]
        else:
            self._add(request, num_wanted)
        for ordinal, index in enumerate(chain):
            self._point_at(request, index, ordinal % len(request.staging))
        if len(request.staging) != num_before and request.staging:
            self._orders.set_staging(request.request_id, len(request.staging))
        self._blocks.release(dropped)

    def drop(self, request: RequestKV) -> None:
        """Give a request's buffers back: it is asleep until `take`. It must not run."""
        if request.asleep:
            return
        for index in request.offloaded:
            group = request.groups[index]
            for position in group.staged_positions():
                group.row[position] = self._blocks.null
            group.buffer = -1
        dropped = _blocks_of(request)
        request.staging = []
        request.asleep = True
        self._blocks.release(dropped)

    def num_to_wake(self, request: RequestKV) -> int:
        """Return how many blocks `take` needs."""
        if not request.asleep:
            return 0
        return max(0, request.num_staged_positions - len(request.uncached))

    def take(self, request: RequestKV) -> bool:
        """Wake a request up; False, and nothing changed, if there are too few blocks."""
        if not request.asleep:
            return True
        if self.num_to_wake(request) > self._blocks.num_free:
            return False
        length = request.num_staged_positions
        request.asleep = False
        if request.offloaded:
            self._begin_buffer(request)
            self._fill(request, 0, length)
            self._orders.set_staging(request.request_id, 1)
            self.assign(request)
        return True

    def extend(self, request: RequestKV, length: int) -> None:
        for number in range(len(request.staging)):
            self._fill(request, number, length)

    def _begin_buffer(self, request: RequestKV) -> None:
        """Give a request one buffer more, with nothing in it but scratch."""
        request.staging.append(list(request.uncached))
        scratch = (block.block_id for block in request.uncached)
        self._orders.fill_staging(request.request_id, len(request.staging) - 1, 0, scratch)

    def _fill(self, request: RequestKV, number: int, length: int) -> None:
        """Take what a buffer lacks in length; nothing changes if there are too few blocks."""
        buffer = request.staging[number]
        start = len(buffer)
        if length <= start:
            return
        buffer.extend(self._blocks.take(length - start))
        new = (block.block_id for block in buffer[start:])
        self._orders.fill_staging(request.request_id, number, start, new)

    def trim(self, request: RequestKV) -> None:
        """Give back what no offloaded group stages any more."""
        length = max(request.num_staged_positions, len(request.uncached))
        for number, buffer in enumerate(request.staging):
            if length < len(buffer):
                self._blocks.release(buffer[length:])
                del buffer[length:]
                self._orders.fill_staging(request.request_id, number, length)

    def _add(self, request: RequestKV, num_wanted: int) -> None:
        while len(request.staging) < num_wanted:
            length = request.staging_length
            if self._blocks.num_free < length - len(request.uncached):
                return
            self._begin_buffer(request)
            self._fill(request, len(request.staging) - 1, length)

    def _point_at(self, request: RequestKV, index: int, buffer: int) -> None:
        """Let a group use a buffer."""
        group = request.groups[index]
        if group.buffer == buffer:
            return
        group.buffer = buffer
        self.load_anew(request, index)

    def load_anew(self, request: RequestKV, index: int) -> None:
        """Have a group load what it has staged, and nothing else."""
        group = request.groups[index]
        self._orders.replace_table((request.request_id, index), group.buffer)
        for staged in group.staged_stretches():
            self.stage(request, index, staged)

    def stage(self, request: RequestKV, index: int, positions: range) -> None:
        """Point row entries of a group at its buffer, and load them from now on."""
        group, stretch = request.groups[index], slice(positions.start, positions.stop)
        group.row[stretch] = request.staging[group.buffer][stretch]
        self._orders.append_table((request.request_id, index), group.buffer, positions)


def _blocks_of(request: RequestKV, first: int = 0) -> list[KVCacheBlock]:
    """Return the blocks of a request's buffers from the `first` one on, without scratch."""
    num_uncached = len(request.uncached)
    return [block for buffer in request.staging[first:] for block in buffer[num_uncached:]]
