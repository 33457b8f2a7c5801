"""Restores: a group comes back in the background, and its row flips when all of it is there."""

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.executor.kv.metadata import RestoreOrder
from services.executor.kv.pool_blocks import PoolBlocks
from services.executor.kv.residency import RequestKV, Restore
from services.executor.kv.staging import StagingBuffers
from services.executor.kv.step_orders import StepOrders


class Restores:
    """Takes target blocks and follows them until they are a row's, or nobody's."""

    def __init__(self, blocks: PoolBlocks, orders: StepOrders, staging: StagingBuffers) -> None:
        self.orphans: dict[int, list[KVCacheBlock]] = {}  # targets of cancelled restores
        self.num_restored_groups = 0  # since the start
        self._blocks = blocks
        self._orders = orders
        self._staging = staging
        self._last_id = 0

    def begin(self, request: RequestKV, index: int) -> bool:
        """Start to bring an offloaded group back; False, and nothing changed, if it cannot be.

        The group stays offloaded, and takes new tokens in own blocks, until `complete`.
        """
        group = request.groups[index]
        if not group.stages or self._orders.next_step < group.restore_from_step:
            return False
        positions = list(group.staged_positions())
        if len(positions) > self._blocks.num_free:
            return False
        self._last_id += 1
        targets = dict(zip(positions, self._blocks.take(len(positions)), strict=True))
        group.restore = Restore(restore_id=self._last_id, targets=targets)
        if not targets:
            self.complete(request, index)
            return True
        self._orders.restore(
            RestoreOrder(
                self._last_id,
                request.request_id,
                index,
                positions,
                [group.host_slots[position] for position in positions],
                [block.block_id for block in targets.values()],
            )
        )
        return True

    def complete(self, request: RequestKV, index: int) -> None:
        """Flip a group's row to the targets, which every rank has filled."""
        group = request.groups[index]
        assert group.restore is not None
        key = (request.request_id, index)
        for position, block in group.restore.targets.items():
            group.row[position] = block
            self._orders.edit_row(key, position, block.block_id)
        group.restore = None
        group.offloaded = False
        group.own = {}
        self.num_restored_groups += 1
        self._orders.drop_table(key)
        self._staging.assign(request)
        self._staging.trim(request)

    def cancel(self, request: RequestKV, index: int) -> bool:
        """Stop bringing a group back; False if it was not.

        Its targets end when every rank has let go of them.
        """
        group = request.groups[index]
        if group.restore is None:
            return False
        restore, group.restore = group.restore, None
        targets = list(restore.targets.values())
        if self._orders.cancel_restore(restore.restore_id):
            self.orphans[restore.restore_id] = targets
        else:
            self._blocks.release(targets)
        return True

    def release_orphan(self, restore_id: int) -> None:
        self._blocks.release(self.orphans.pop(restore_id))
