"""The life of every KV block: the one place where blocks are taken, move between uses, and end.

A block begins in `grow` (a token needs room), in `add_staging` (a second buffer) or in
`begin_restore` (a target). It moves in `seal`, when the host copy of an offloaded group's full
block is complete: the block becomes staging, or is given back. It ends in `_release`: sealed,
trimmed, or its request is freed. Nothing is taken from or given to the pool anywhere else.

Everything here is bookkeeping of the scheduler; the orders that follow from it go to the ranks
with the next step, and each rank carries out steps one after the other.
"""

from collections.abc import Iterable, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.executor.kv.host_pool import HostPool
from services.executor.kv.metadata import RestoreOrder
from services.executor.kv.residency import GroupKV, LayerPlacement, RequestKV, Restore
from services.executor.kv.step_orders import StepOrders
from services.placement.blocks import BlockGeometry


class BlockOwner:
    """Owns the KV blocks and host slots of all requests."""

    def __init__(
        self,
        pool: BlockPool,
        host: HostPool,
        geometry: BlockGeometry,
        *,
        orders: StepOrders,
        poison_freed: bool = False,
    ) -> None:
        self.pool = pool
        self.host = host
        self.geometry = geometry
        self.orders = orders
        self.requests: dict[str, RequestKV] = {}
        self.orphans: dict[int, list[KVCacheBlock]] = {}  # targets of cancelled restores
        self.num_sealed_blocks = 0  # given back by `seal`, since the start
        self.num_restored_groups = 0  # since the start
        self._poison_freed = poison_freed
        self._last_restore_id = 0

    # -- a request's beginning and end ------------------------------------------------------

    def draft(self, request_id: str, placement: LayerPlacement, *, num_slots: int) -> RequestKV:
        """Return a request without blocks, with `num_slots` reserved on the host if they fit.

        A request that gets no room is not mirrored and stays resident, whatever its placement. A
        draft is made real by `adopt`, or thrown away by `discard`.
        """
        mirrored = self.host.reserve(request_id, num_slots)
        request = RequestKV(
            request_id=request_id,
            groups=[GroupKV() for _ in range(self.geometry.num_groups)],
            mirrored=mirrored,
            wanted_staging=placement.num_staging,
        )
        if mirrored and placement.offloaded:
            for index in placement.offloaded:
                request.groups[index].offloaded = True
            request.staging = [
                [] for _ in range(min(placement.num_staging, len(placement.offloaded)))
            ]
            for ordinal, index in enumerate(request.chain()):
                request.groups[index].buffer = ordinal % len(request.staging)
        return request

    def adopt(self, request: RequestKV) -> None:
        """Take a draft in."""
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request
        if request.staging:
            self.orders.set_staging(request.request_id, len(request.staging))
            for index in request.chain():
                self.orders.replace_table((request.request_id, index), [], [])

    def discard(self, request: RequestKV) -> None:
        self.host.cancel_reservation(request.request_id)

    def pop(self, request_id: str) -> list[KVCacheBlock]:
        """Forget a request and return its blocks; the caller gives them to the pool.

        Targets of a running restore are not among them: a rank may still write to them.
        """
        request = self.requests.pop(request_id, None)
        if request is None:
            return []
        for index in range(len(request.groups)):
            self.cancel_restore(request, index)
        blocks = request.owned_blocks()
        for group in request.groups:
            self.host.give_back(group.host_slots)
        self.host.cancel_reservation(request_id)
        self.orders.drop_request(request_id)
        self._poison(blocks)
        return blocks

    # -- growth -----------------------------------------------------------------------------

    def num_new_blocks(self, request: RequestKV, *, num_tokens: int) -> int:
        """Return how many blocks `grow` will take from the pool."""
        num_have, num_want = request.num_row_blocks, self._num_blocks(num_tokens)
        if num_want <= num_have:
            return 0
        direct_end = self._direct_end(request, num_tokens)
        num_staging_groups = sum(group.stages for group in request.groups)
        num_new = (len(request.groups) - num_staging_groups) * (num_want - num_have)
        num_new += num_staging_groups * (num_want - direct_end)
        if direct_end > num_have:
            num_new += sum(max(0, direct_end - len(buffer)) for buffer in request.staging)
        return num_new

    def grow(self, request: RequestKV, *, num_tokens: int) -> tuple[list[KVCacheBlock], ...]:
        """Make room for `num_tokens` tokens; return what each group's row gains.

        Blocks that the step fills completely go straight to staging in offloaded groups: the
        prefill of a prompt never holds more than its placement does.
        """
        num_have, num_want = request.num_row_blocks, self._num_blocks(num_tokens)
        if num_want <= num_have:
            return tuple([] for _ in request.groups)
        direct_end = self._direct_end(request, num_tokens)
        if direct_end > num_have:
            self._extend_staging(request, direct_end)
        gained = tuple(
            self._grow_group(request, group, direct_end, num_want) for group in request.groups
        )
        return gained

    def _grow_group(
        self, request: RequestKV, group: GroupKV, direct_end: int, num_want: int
    ) -> list[KVCacheBlock]:
        gained: list[KVCacheBlock] = []
        num_have = len(group.row)
        if group.stages and direct_end > num_have:
            gained.extend(request.staging[group.buffer][num_have:direct_end])
            self._take_slots(request, group, direct_end)
        own = self.pool.get_new_blocks(num_want - num_have - len(gained))
        if self._poison_freed:
            self.orders.clear(block.block_id for block in own)
        if group.offloaded:
            first = num_have + len(gained)
            group.own.update(enumerate(own, start=first))
        gained.extend(own)
        group.row.extend(gained)
        return gained

    def _direct_end(self, request: RequestKV, num_tokens: int) -> int:
        """Return the position up to which new blocks are staging blocks in offloaded groups."""
        num_have = request.num_row_blocks
        num_full = num_tokens // self.geometry.block_size
        staging_groups = [group for group in request.groups if group.stages]
        if num_full <= num_have or not staging_groups:
            return num_have
        num_slots = sum(max(0, num_full - len(group.host_slots)) for group in staging_groups)
        if not self.host.can_take(request.request_id, num_slots):
            return num_have
        return num_full

    def _extend_staging(self, request: RequestKV, length: int) -> None:
        for buffer in request.staging:
            buffer.extend(self.pool.get_new_blocks(max(0, length - len(buffer))))

    def _take_slots(self, request: RequestKV, group: GroupKV, length: int) -> bool:
        """Give the group's first `length` positions slots; False if the host pool is full."""
        num_missing = length - len(group.host_slots)
        if num_missing <= 0:
            return True
        slots = self.host.take(request.request_id, num_missing)
        if slots is None:
            return False
        group.host_slots.extend(slots)
        return True

    def prepare_save(self, request: RequestKV, group: GroupKV, num_full: int) -> bool:
        """Give all full blocks of a group a slot; False if the host pool is full."""
        return request.mirrored and self._take_slots(request, group, num_full)

    # -- offload ----------------------------------------------------------------------------

    def offload(self, request: RequestKV, groups: Iterable[int]) -> None:
        """Make groups offloaded. Blocks whose host copy is complete are given back at once.

        The others follow in `seal` as their copies complete. A group that is being restored stays
        where it is.
        """
        assert request.mirrored, f"{request.request_id} has no room on the host"
        for index in groups:
            group = request.groups[index]
            if group.offloaded:
                self.cancel_restore(request, index)
                continue
            group.offloaded = True
            group.own = dict(enumerate(group.row))
            group.buffer = -1
        self._assign_buffers(request)
        self.seal(request)

    def seal(self, request: RequestKV) -> None:
        """Give up own blocks of offloaded groups whose host copies are complete.

        A position is sealed in all groups together. Its first blocks become the staging blocks of
        that position where there are none yet, so that sealing never takes a block.
        """
        groups = [group for group in request.groups if group.stages]
        if not groups:
            return
        num_complete = min(group.num_host_blocks for group in groups)
        positions = sorted(
            {position for group in groups for position in group.own if position < num_complete}
        )
        freed: list[KVCacheBlock] = []
        for position in positions:
            holders = [
                (index, group)
                for index, group in enumerate(request.groups)
                if group.stages and position in group.own
            ]
            if position >= request.staging_length:
                if len(holders) < len(request.staging):
                    break
                self._donate(request, holders, position)
            for index, _ in holders:
                freed.extend(self._seal_one(request, index, position))
        self.num_sealed_blocks += len(freed)
        self._release(freed)

    def _donate(
        self, request: RequestKV, holders: Sequence[tuple[int, GroupKV]], position: int
    ) -> None:
        """Make own blocks of `holders` the staging blocks of a position, one per buffer."""
        assert position == request.staging_length
        unused = [group for _, group in holders]
        for number, buffer in enumerate(request.staging):
            donor = next((group for group in unused if group.buffer == number), unused[0])
            unused.remove(donor)
            buffer.append(donor.own[position])

    def _seal_one(self, request: RequestKV, index: int, position: int) -> list[KVCacheBlock]:
        """Point one row entry at staging; return its own block unless it became staging."""
        group = request.groups[index]
        key = (request.request_id, index)
        own = group.own.pop(position)
        staged = request.staging[group.buffer][position]
        self.orders.append_table(key, group.host_slots[position], staged.block_id)
        if staged is not own:
            group.row[position] = staged
            self.orders.edit_row(key, position, staged.block_id)
        if any(own is buffer[position] for buffer in request.staging):
            return []
        return [own]

    # -- staging buffers --------------------------------------------------------------------

    def set_staging(self, request: RequestKV, num_staging: int) -> None:
        """Ask for a number of staging buffers; there may be fewer for want of blocks."""
        if request.wanted_staging != num_staging:
            request.wanted_staging = num_staging
            self._assign_buffers(request)

    def _assign_buffers(self, request: RequestKV) -> None:
        """Give offloaded groups their buffers in turns, after the set of them has changed."""
        chain = request.chain()
        num_before = len(request.staging)
        num_wanted = min(request.wanted_staging, len(chain))
        dropped: list[KVCacheBlock] = []
        if not request.staging:
            request.staging = [[] for _ in range(num_wanted)]
        elif len(request.staging) > num_wanted:
            dropped = [block for buffer in request.staging[num_wanted:] for block in buffer]
            del request.staging[num_wanted:]
        else:
            self._add_staging(request, num_wanted)
        for ordinal, index in enumerate(chain):
            self._point_at(request, index, ordinal % len(request.staging))
        if len(request.staging) != num_before and request.staging:
            self.orders.set_staging(request.request_id, len(request.staging))
        self._release(dropped)

    def _add_staging(self, request: RequestKV, num_wanted: int) -> None:
        while len(request.staging) < num_wanted:
            if self.pool.get_num_free_blocks() < request.staging_length:
                return
            request.staging.append(self.pool.get_new_blocks(request.staging_length))

    def _point_at(self, request: RequestKV, index: int, buffer: int) -> None:
        group = request.groups[index]
        if group.buffer == buffer:
            return
        group.buffer = buffer
        key = (request.request_id, index)
        slots, block_ids = [], []
        for position in group.staged_positions():
            block = request.staging[buffer][position]
            group.row[position] = block
            slots.append(group.host_slots[position])
            block_ids.append(block.block_id)
            self.orders.edit_row(key, position, block.block_id)
        self.orders.replace_table(key, slots, block_ids)

    def _trim_staging(self, request: RequestKV) -> None:
        length = max(
            (
                max(request.groups[index].staged_positions(), default=-1)
                for index in request.chain()
            ),
            default=-1,
        )
        for buffer in request.staging:
            self._release(buffer[length + 1 :])
            del buffer[length + 1 :]

    # -- restore ----------------------------------------------------------------------------

    def begin_restore(self, request: RequestKV, index: int) -> bool:
        """Start to bring an offloaded group back; False, and nothing changed, if it cannot be.

        The group stays offloaded, and takes new tokens in own blocks, until `complete_restore`.
        """
        group = request.groups[index]
        if not group.stages:
            return False
        positions = list(group.staged_positions())
        if len(positions) > self.pool.get_num_free_blocks():
            return False
        self._last_restore_id += 1
        targets = dict(zip(positions, self.pool.get_new_blocks(len(positions)), strict=True))
        group.restore = Restore(restore_id=self._last_restore_id, targets=targets)
        if not targets:
            self.complete_restore(request, index)
            return True
        self.orders.restore(
            RestoreOrder(
                self._last_restore_id,
                index,
                [group.host_slots[position] for position in positions],
                [block.block_id for block in targets.values()],
            )
        )
        return True

    def complete_restore(self, request: RequestKV, index: int) -> None:
        """Flip a group's row to the targets, which every rank has filled."""
        group = request.groups[index]
        assert group.restore is not None
        key = (request.request_id, index)
        for position, block in group.restore.targets.items():
            group.row[position] = block
            self.orders.edit_row(key, position, block.block_id)
        group.restore = None
        group.offloaded = False
        group.own = {}
        self.num_restored_groups += 1
        self.orders.drop_table(key)
        self._assign_buffers(request)
        self._trim_staging(request)

    def cancel_restore(self, request: RequestKV, index: int) -> bool:
        """Stop bringing a group back; False if it was not.

        Its targets end when every rank has let go of them.
        """
        group = request.groups[index]
        if group.restore is None:
            return False
        restore, group.restore = group.restore, None
        targets = list(restore.targets.values())
        if self.orders.cancel_restore(restore.restore_id):
            self.orphans[restore.restore_id] = targets
        else:
            self._release(targets)
        return True

    def release_orphan(self, restore_id: int) -> None:
        self._release(self.orphans.pop(restore_id))

    # -- the end of blocks ------------------------------------------------------------------

    def _release(self, blocks: Sequence[KVCacheBlock]) -> None:
        if blocks:
            self._poison(blocks)
            self.pool.free_blocks(blocks)

    def _poison(self, blocks: Iterable[KVCacheBlock]) -> None:
        if self._poison_freed:
            self.orders.poison(block.block_id for block in blocks)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.geometry.block_size)

    def check_integrity(self, num_deferred: int = 0) -> None:
        """Assert that every block and slot has one owner, and none is lost.

        `num_deferred` blocks are popped and wait for steps in flight to end.
        """
        owned: list[KVCacheBlock] = [b for blocks in self.orphans.values() for b in blocks]
        for request in self.requests.values():
            request.check_integrity()
            owned.extend(request.owned_blocks())
        ids = [block.block_id for block in owned]
        assert len(ids) == len(set(ids)), "a block is owned twice"
        assert all(block.ref_cnt == 1 for block in owned), "an owned block is free or shared"
        num_usable = self.pool.num_gpu_blocks - 1  # vLLM keeps one as the null block
        num_free = self.pool.get_num_free_blocks()
        assert num_free + len(owned) + num_deferred == num_usable, (
            f"{num_usable} blocks: {num_free} free, {len(owned)} owned, {num_deferred} deferred"
        )
        slots = [s for r in self.requests.values() for g in r.groups for s in g.host_slots]
        self.host.check_integrity(slots)
