"""Restores: a group comes back in the background, and its row flips when all of it is there.

What free blocks of the pool still hold of it comes back at once.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.control.counters import Counters
from services.executor.blocks.holder import GroupKV, Holder, Restore, stretches
from services.executor.blocks.pool_blocks import PoolBlocks
from services.executor.blocks.staging import StagingBuffers
from services.executor.blocks.step_orders import StepOrders
from services.executor.step_messages import FoundOrder, RestoreOrder


class Restores:
    """Takes target blocks and follows them until they are a row's, or given back."""

    def __init__(
        self, blocks: PoolBlocks, orders: StepOrders, staging: StagingBuffers, counters: Counters
    ) -> None:
        self.orphans: dict[int, list[KVCacheBlock]] = {}  # targets of cancelled restores
        self.blocks = blocks
        self.orders = orders
        self.staging = staging
        self._counters = counters
        self._last_id = 0

    def begin(self, kv: Holder, index: int) -> bool:
        """Start to bring an offloaded group back; False, and nothing changed, if it cannot be.

        The group stays offloaded, and takes new tokens in own blocks, until `complete`.
        """
        group = kv.groups[index]
        if not self._may_begin(group):
            return False
        num_blocks = sum(1 for _ in group.staged_positions())
        if num_blocks > self.blocks.num_free:
            return False
        group.restore = Restore()
        self.extend(kv, index, max_blocks=num_blocks)
        return True

    def begin_in_parts(self, kv: Holder, index: int) -> None:
        """Start to bring back a group of a request that is asleep; `extend` takes its blocks.

        One that cannot come back now stays on the host.
        """
        assert kv.asleep
        group = kv.groups[index]
        if self._may_begin(group):
            group.restore = Restore()
            self.extend(kv, index, max_blocks=0)

    def _may_begin(self, group: GroupKV) -> bool:
        """Return whether a group is on the host, and no load of it has just failed."""
        return group.stages and self.orders.next_step >= group.restore_from_step

    def extend(self, kv: Holder, index: int, *, max_blocks: int) -> int:
        """Take blocks for what has none yet, and return how many were taken.

        Those that still hold its KV come first; the copy of the rest is ordered. A group with
        nothing to copy has come back.
        """
        num_found = self.find(kv, index, max_blocks=max_blocks)
        return num_found + self.load(kv, index, max_blocks=max_blocks - num_found)

    def load(self, kv: Holder, index: int, *, max_blocks: int) -> int:
        """Take blocks for what has none yet, whose copy is ordered, and return how many."""
        group = kv.groups[index]
        restore = group.restore
        assert restore is not None
        missing = _missing(group)
        positions = missing[: max(0, max_blocks)]
        if positions:
            slots = [group.host_slots[position] for position in positions]
            uids = [kv.uid(position) for position in positions]
            restore_id, blocks = self.order(kv.request_id, index, uids, slots)
            restore.targets.update(zip(positions, blocks, strict=True))
            restore.under_way[restore_id] = blocks
        elif not missing and not restore.under_way:
            self.complete(kv, index)
        return len(positions)

    def order(
        self, request_id: str, index: int, uids: Sequence[int], slots: Sequence[int]
    ) -> tuple[int, list[KVCacheBlock]]:
        """Take blocks and have slots copied to them; return the order's number, and the blocks.

        `request_id`: or another holder's name. `uids`: of what is in the slots.

        Only the caller has them yet.
        """
        blocks = self.blocks.take(len(slots))
        self._last_id += 1
        self._counters.num_loaded_blocks += len(blocks)
        self.orders.restore(
            RestoreOrder(
                self._last_id,
                request_id,
                index,
                list(uids),
                list(slots),
                [block.block_id for block in blocks],
            )
        )
        return self._last_id, blocks

    def order_lacking(
        self,
        request_id: str,
        index: int,
        found: Sequence[KVCacheBlock | None],
        uids: Sequence[int],
        slots: Sequence[int],
    ) -> tuple[dict[int, list[KVCacheBlock]], list[KVCacheBlock]]:
        """Do what `order` does where no block was found.

        Return the blocks taken, by the order's number, if any were; and all blocks, in turn.
        """
        lacking = [n for n, block in enumerate(found) if block is None]
        ordered: dict[int, list[KVCacheBlock]] = {}
        if lacking:
            restore_id, loaded = self.order(
                request_id, index, [uids[n] for n in lacking], [slots[n] for n in lacking]
            )
            ordered[restore_id] = loaded
        rest = iter(block for blocks in ordered.values() for block in blocks)
        return ordered, [next(rest) if block is None else block for block in found]

    def find(self, kv: Holder, index: int, *, max_blocks: int) -> int:
        """Take blocks that still hold KV of the group, of the first so many that it lacks; return
        how many these are.

        A request's groups are all to find theirs before one of them loads: it takes the free blocks
        that were left first, which may be the others'.
        """
        if max_blocks <= 0 or not self.blocks.num_left:
            return 0
        group = kv.groups[index]
        positions = _missing(group)[:max_blocks]
        found = self.blocks.find([kv.uid(position) for position in positions], index)
        here = {p: block for p, block in zip(positions, found, strict=True) if block is not None}
        if not here:
            return 0
        assert group.restore is not None
        group.restore.targets.update(here)
        self.note_found(
            FoundOrder(
                kv.request_id,
                index,
                [kv.uid(position) for position in here],
                [group.host_slots[position] for position in here],
                [block.block_id for block in here.values()],
            )
        )
        return len(here)

    def note_found(self, order: FoundOrder) -> None:
        """Count blocks that are taken as they are, and tell the ranks."""
        self._counters.num_found_blocks += len(order.block_ids)
        self.orders.found(order)

    def arrive(self, kv: Holder, index: int, done: Collection[int]) -> None:
        """Take in which orders every rank has carried out; flip the row after the last one."""
        restore = kv.groups[index].restore
        if restore is None or restore.under_way.keys().isdisjoint(done):
            return
        for restore_id in restore.under_way.keys() & set(done):
            del restore.under_way[restore_id]
        self.extend(kv, index, max_blocks=0)

    def complete(self, kv: Holder, index: int) -> None:
        """Flip a group's row to the targets, which every rank has filled."""
        group = kv.groups[index]
        assert group.restore is not None
        key = (kv.request_id, index)
        targets = group.restore.targets
        for stretch in stretches(sorted(targets)):
            blocks = [targets[position] for position in stretch]
            group.row[stretch.start : stretch.stop] = blocks
            self.orders.edit_row(key, stretch.start, [block.block_id for block in blocks])
        group.restore = None
        group.offloaded = False
        group.own = {}
        self._counters.num_restored_groups += 1
        self.orders.drop_table(key)
        if not kv.asleep:
            self.staging.assign(kv)
            self.staging.trim(kv)

    def cancel(self, kv: Holder, index: int) -> bool:
        """Stop bringing a group back; False if it was not.

        Its targets end when every rank has let go of them.
        """
        group = kv.groups[index]
        if group.restore is None:
            return False
        self.orders.forget_found((kv.request_id, index))
        restore, group.restore = group.restore, None
        self.let_go(restore.targets.values(), restore.under_way)
        return True

    def let_go(
        self, targets: Iterable[KVCacheBlock], under_way: Mapping[int, list[KVCacheBlock]]
    ) -> None:
        """Give back blocks that were taken for copies: some of these are under way."""
        arrived = {block.block_id: block for block in targets}
        for restore_id, blocks in under_way.items():
            if self.orders.cancel_restore(restore_id):
                self.orphans[restore_id] = blocks
                for block in blocks:
                    del arrived[block.block_id]
        self.blocks.release(list(arrived.values()))

    def release_orphan(self, restore_id: int) -> None:
        self.blocks.release(self.orphans.pop(restore_id))


def _missing(group: GroupKV) -> list[int]:
    """Return the positions of a group that comes back which have no block to come back to yet."""
    assert group.restore is not None
    targets = group.restore.targets
    return [position for position in group.staged_positions() if position not in targets]
