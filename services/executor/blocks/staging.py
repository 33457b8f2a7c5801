"""Staging buffers: pool blocks that a request's offloaded groups take turns in."""

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.executor.blocks.holder import Holder
from services.executor.blocks.pool_blocks import PoolBlocks
from services.executor.blocks.step_orders import StepOrders


class StagingBuffers:
    """Gives offloaded groups their buffers, and takes blocks for them and back."""

    def __init__(self, blocks: PoolBlocks, orders: StepOrders) -> None:
        self._blocks = blocks
        self._orders = orders

    def set_number(self, kv: Holder, num_staging: int) -> None:
        """Ask for a number of staging buffers; there may be fewer for want of blocks."""
        if kv.wanted_staging != num_staging:
            kv.wanted_staging = num_staging
            self.assign(kv)

    def assign(self, kv: Holder) -> None:
        """Give offloaded groups their buffers in turns, after the set of them has changed."""
        if kv.asleep:
            return
        chain = kv.offloaded
        num_before = len(kv.staging)
        num_wanted = min(kv.wanted_staging, len(chain))
        dropped = []
        if not kv.staging:
            for _ in range(num_wanted):
                self._begin_buffer(kv)
        elif len(kv.staging) > num_wanted:
            dropped = _blocks_of(kv, first=num_wanted)
            del kv.staging[num_wanted:]
        else:
            self._add(kv, num_wanted)
        for ordinal, index in enumerate(chain):
            self._point_at(kv, index, ordinal % len(kv.staging))
        if len(kv.staging) != num_before and kv.staging:
            self._orders.set_staging(kv.request_id, len(kv.staging))
        self._blocks.release(dropped)

    def drop(self, kv: Holder) -> None:
        """Give a request's buffers back: it is asleep until `take`. It must not run."""
        if kv.asleep:
            return
        for index in kv.offloaded:
            group = kv.groups[index]
            for position in group.staged_positions():
                group.row[position] = self._blocks.null
            group.buffer = -1
        dropped = _blocks_of(kv)
        kv.staging = []
        kv.asleep = True
        self._blocks.release(dropped)

    def num_to_wake(self, kv: Holder) -> int:
        """Return how many blocks `take` needs."""
        if not kv.asleep:
            return 0
        return max(0, kv.num_staged_positions - kv.first)

    def take(self, kv: Holder) -> bool:
        """Wake a request up; False, and nothing changed, if there are too few blocks."""
        if not kv.asleep:
            return True
        if self.num_to_wake(kv) > self._blocks.num_free:
            return False
        self.begin(kv)
        self.assign(kv)
        return True

    def begin(self, kv: Holder) -> None:
        """Wake a holder up with one buffer; `assign` gives its groups their buffers."""
        length = kv.num_staged_positions
        kv.asleep = False
        if kv.offloaded:
            self._begin_buffer(kv)
            self._fill(kv, 0, length)
            self._orders.set_staging(kv.request_id, 1)

    def extend(self, kv: Holder, length: int) -> None:
        for number in range(len(kv.staging)):
            self._fill(kv, number, length)

    def _begin_buffer(self, kv: Holder) -> None:
        """Give a holder one buffer more, with nothing in it of its own."""
        before = kv.groups[0].row[: kv.first]
        kv.staging.append(before)
        ids = (block.block_id for block in before)
        self._orders.fill_staging(kv.request_id, len(kv.staging) - 1, 0, ids)

    def _fill(self, kv: Holder, number: int, length: int) -> None:
        """Take what a buffer lacks in length; nothing changes if there are too few blocks."""
        buffer = kv.staging[number]
        start = len(buffer)
        if length <= start:
            return
        buffer.extend(self._blocks.take(length - start))
        new = (block.block_id for block in buffer[start:])
        self._orders.fill_staging(kv.request_id, number, start, new)

    def trim(self, kv: Holder) -> None:
        """Give back what no offloaded group stages any more."""
        length = max(kv.num_staged_positions, kv.first)
        for number, buffer in enumerate(kv.staging):
            if length < len(buffer):
                self._blocks.release(buffer[length:])
                del buffer[length:]
                self._orders.fill_staging(kv.request_id, number, length)

    def _add(self, kv: Holder, num_wanted: int) -> None:
        while len(kv.staging) < num_wanted:
            length = kv.staging_length
            if self._blocks.num_free < length - kv.first:
                return
            self._begin_buffer(kv)
            self._fill(kv, len(kv.staging) - 1, length)

    def _point_at(self, kv: Holder, index: int, buffer: int) -> None:
        """Let a group use a buffer."""
        group = kv.groups[index]
        if group.buffer == buffer:
            return
        group.buffer = buffer
        self.load_anew(kv, index)

    def load_anew(self, kv: Holder, index: int) -> None:
        """Have a group load what it has staged, and nothing else."""
        group = kv.groups[index]
        self._orders.replace_table((kv.request_id, index), group.buffer)
        for staged in group.staged_stretches():
            self.stage(kv, index, staged)

    def stage(self, kv: Holder, index: int, positions: range) -> None:
        """Point row entries of a group at its buffer, and load them from now on."""
        group, stretch = kv.groups[index], slice(positions.start, positions.stop)
        group.row[stretch] = kv.staging[group.buffer][stretch]
        self._orders.append_table((kv.request_id, index), group.buffer, positions)


def _blocks_of(kv: Holder, first: int = 0) -> list[KVCacheBlock]:
    """Return a holder's own blocks in its buffers from the `first` one on."""
    return [block for buffer in kv.staging[first:] for block in buffer[kv.first :]]
