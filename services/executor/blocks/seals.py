"""Gives up own blocks of offloaded layer groups once their host copies are complete."""

from bisect import bisect_left
from collections.abc import Sequence

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.control.counters import Counters
from services.executor.blocks.holder import GroupKV, Holder, stretches
from services.executor.blocks.pool_blocks import PoolBlocks
from services.executor.blocks.staging import StagingBuffers
from services.executor.blocks.step_orders import StepOrders


class Seals:
    """Turns own blocks into staging blocks, or gives them back."""

    def __init__(
        self, blocks: PoolBlocks, orders: StepOrders, staging: StagingBuffers, counters: Counters
    ) -> None:
        self._blocks, self._orders, self._staging = blocks, orders, staging
        self._counters = counters

    def seal(self, kv: Holder) -> None:
        """Give up what can be given up of a request.

        A position is sealed in all groups together. Its first blocks become the staging blocks of
        that position where there are none yet, so that sealing never takes a block.
        """
        groups = [group for group in kv.groups if group.stages]
        if not groups:
            return
        if kv.asleep:
            self._seal_asleep(kv)
            return
        num_complete = min(group.num_host_blocks for group in groups)
        donated: set[int] = set()
        for position in range(kv.staging_length, num_complete):
            holders = [group for group in groups if position in group.own]
            if not holders or len(holders) < len(kv.staging):
                break
            donated.update(self._donate(kv, holders, position))
        sealed = self._seal_staged(kv, min(num_complete, kv.staging_length))
        freed = [block for block in sealed if block.block_id not in donated]
        self._counters.num_sealed_blocks += len(freed)
        self._blocks.release(freed)

    def _seal_staged(self, kv: Holder, num_positions: int) -> list[KVCacheBlock]:
        """Point row entries that have staging blocks, of the first positions, at these.

        Return the groups' own blocks there, which are not theirs any more.
        """
        freed: list[KVCacheBlock] = []
        for index, group in enumerate(kv.groups):
            if not group.stages or not group.own:
                continue
            positions = sorted(group.own)
            positions = positions[: bisect_left(positions, num_positions)]
            if not positions:
                continue
            freed.extend(map(group.own.pop, positions))
            for stretch in stretches(positions):
                self._staging.stage(kv, index, stretch)
        return freed

    def _seal_asleep(self, kv: Holder) -> None:
        """Give up every own block whose copy is complete; no step needs staging for it.

        What leaves the pool for good may be found in it still, by whoever begins with its columns:
        it keeps what is in none yet.
        """
        leaves = kv.leaves_columns and all(group.stages for group in kv.groups)
        num_columns = min(len(kv.columns), kv.num_copied_blocks)
        given_up: dict[int, list[KVCacheBlock | None]] = {}
        for index, group in enumerate(kv.groups):
            end = num_columns if leaves else group.num_host_blocks
            for position in [p for p in group.own if p < end] if group.stages else ():
                blocks = given_up.setdefault(position, [None] * len(kv.groups))
                blocks[index] = group.own.pop(position)
                group.row[position] = self._blocks.null
        freed = [block for blocks in given_up.values() for block in blocks if block is not None]
        self._counters.num_sealed_blocks += len(freed)
        if leaves:
            last_first = sorted(given_up, reverse=True)  # the last ones are taken first
            self._blocks.leave(
                (kv.columns[position], given_up[position]) for position in last_first
            )
        else:
            self._blocks.release(freed)

    def _donate(self, kv: Holder, holders: Sequence[GroupKV], position: int) -> list[int]:
        """Make own blocks of `holders` the staging blocks of a position, one per buffer.

        Return their ids.
        """
        assert position == kv.staging_length
        unused, donated = list(holders), []
        for number, buffer in enumerate(kv.staging):
            donor = next((group for group in unused if group.buffer == number), unused[0])
            unused = [group for group in unused if group is not donor]
            block = donor.own[position]
            buffer.append(block)
            self._orders.fill_staging(kv.request_id, number, position, [block.block_id])
            donated.append(block.block_id)
        return donated
