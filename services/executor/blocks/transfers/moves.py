"""The moves that the capacity guard and the resumes order, on real blocks."""

from collections.abc import Collection, Iterable, Sequence

from services.control.prefixes.trunks import give_up, hold
from services.control.requests.request_record import RequestRecord
from services.control.room.moves import Loading
from services.executor.blocks.block_owner import BlockOwner
from services.executor.blocks.holder import GroupKV, Holder
from services.executor.blocks.residency import RequestKV
from services.executor.blocks.transfers.transfers import Transfers
from services.placement.blocks import BlockGeometry


class BlockMoves:
    """`ReturnMoves` over a `BlockOwner`."""

    def __init__(
        self,
        owner: BlockOwner,
        transfers: Transfers,
        *,
        overlap: bool = True,
    ) -> None:
        """With `overlap`, loads begin with the first blocks that are free; else with all."""
        self._owner, self._transfers, self._overlap = owner, transfers, overlap

    @property
    def geometry(self) -> BlockGeometry:
        return self._owner.geometry

    @property
    def num_blocks(self) -> int:
        """What uncached prefixes save counts as room: requests are counted as if they had none."""
        num_blocks: int = self._owner.pool.num_gpu_blocks - 1  # one is vLLM's null block
        return num_blocks + self._owner.uncached.num_saved_blocks

    @property
    def num_free(self) -> int:
        return self._owner.blocks.num_free

    def all(self) -> Iterable[Holder]:
        return self._owner.holders()

    def idle(self, but: Collection[RequestRecord[RequestKV]]) -> list[Holder]:
        others = [kv for kv in self._owner.kvs if kv.record not in but]
        if not others:
            return []
        trunks = [
            trunk
            for trunk in self._owner.trunks.all
            if all(user.record not in but for user in trunk.users)
        ]
        return [*self._transfers.write_through.by_likelihood(others), *trunks]

    def num_new(self, kv: RequestKV, num_tokens: int) -> int:
        num_ahead = num_tokens + self.geometry.max_ahead_tokens
        num_new = self._owner.growth.num_new_blocks(
            kv, num_tokens=num_ahead, num_accepted=num_tokens
        )
        if self.geometry.side_windows:
            num_new += self._owner.side_copies.num_to_come(kv, num_tokens=num_ahead)
        return num_new

    def num_side_blocks(self, kv: Holder) -> int:
        return self._owner.sides.num_owned_by(kv.request_id)

    def num_to_wake(self, kv: Holder) -> int:
        return self._owner.staging.num_to_wake(kv)

    def offload(self, kv: Holder, groups: Sequence[int]) -> None:
        self._owner.offload(kv, groups)
        if isinstance(kv, RequestKV):  # all of a trunk is on the host
            self._transfers.write_through.note(kv)

    def restore(self, kv: Holder, group: int) -> None:
        self._owner.restores.begin(kv, group)

    def set_staging(self, kv: Holder, num_buffers: int) -> None:
        self._owner.staging.set_number(kv, num_buffers)

    def sleep(self, kv: Holder) -> None:
        self._owner.staging.drop(kv)

    def give_up_restores(self) -> bool:
        return self._transfers.relieve()

    # -- the way back -------------------------------------------------------------------------

    def reserve(self, kv: RequestKV, num_slots: int) -> bool:
        num_held = sum(len(group.host_slots) for group in kv.groups)
        num_held += 0 if kv.side_copy is None else len(kv.side_copy.own_slots)
        self._owner.host.withdraw(kv.promise)
        return self._owner.reserve(kv, max(0, num_slots - num_held))

    def drop(self, kv: RequestKV) -> None:
        self._owner.forget(kv)

    def share(self, kv: RequestKV) -> None:
        if not kv.trunks:
            self._owner.trunks.join(kv)

    def keep_shared(self, kv: RequestKV) -> None:
        self._owner.keep(kv, kv.num_shared)

    def num_to_fit(self, kv: RequestKV) -> int:
        return self._owner.trunks.num_to_fit(kv)

    def stay(self, kv: RequestKV, num_left: int) -> bool:
        if (len(kv.keys) + 1 - kv.num_shared) * len(kv.groups) <= num_left:
            self._owner.trunks.revive(kv)
        if not kv.trunks:
            return False
        self.keep_shared(kv)
        kv.mirrored = False
        for index, group in enumerate(kv.groups):
            group.restore_from_step = 0  # there is nothing to load
            self._owner.restores.begin_in_parts(kv, index)
        return True

    def begin_load(self, kv: RequestKV, groups: Sequence[int], *, num_buffers: int) -> None:
        kv.wanted_staging = num_buffers
        hold(kv)
        for index in groups:
            self._owner.restores.begin_in_parts(kv, index)

    def load_on(self, kv: RequestKV, num_left: int) -> Loading:
        coming = [
            (holder, index, group)
            for holder in (*kv.trunks, kv)
            if holder.asleep  # else its groups come back while it is in steps
            for index, group in enumerate(holder.groups)
            if group.restore is not None
        ]
        copies = self._owner.side_copies
        num_lacking = copies.num_lacking(kv) + sum(lacking(group) for _, _, group in coming)
        if not self._overlap and num_lacking > num_left:
            return Loading(is_complete=False, lacks_blocks=True)
        restores = self._owner.restores
        for holder, index, _ in coming:
            num_left -= restores.find(holder, index, max_blocks=num_left)
        num_left -= copies.bring_back(kv, max_blocks=num_left)
        lacks_blocks, is_complete = copies.num_lacking(kv) > 0, not copies.is_coming(kv)
        for holder, index, group in coming:
            num_left -= restores.load(holder, index, max_blocks=num_left)
            if group.restore is not None:
                is_complete = False
                lacks_blocks |= lacking(group) > 0
        return Loading(is_complete=is_complete, lacks_blocks=lacks_blocks)

    def num_to_find(self, kv: RequestKV, groups: Collection[int]) -> int:
        positions = range(kv.num_shared, kv.num_host_blocks)
        return self._owner.blocks.num_to_find(kv.uids(positions), groups)

    def num_first_to_load(self, kv: RequestKV) -> int:
        return self._owner.side_copies.num_to_load(kv)

    def wake(self, kv: RequestKV) -> bool:
        is_awake = self._owner.trunks.wake(kv)
        if is_awake:
            self._owner.side_copies.show(kv)
            self._owner.publishing.expect(kv)
        return is_awake

    def put_back(self, kv: RequestKV) -> None:
        if not kv.mirrored:  # it has nothing of its own
            self._owner.forget(kv)
            return
        give_up(kv)
        self._owner.publishing.end(kv)
        self._owner.side_copies.put_back(kv)
        self._owner.staging.drop(kv)
        self._owner.offload(kv, range(len(kv.groups)))
        num_kept = kv.num_host_blocks  # behind them others have it in the pool only
        self._owner.blocks.release(self._owner.trunks.leave(kv))
        if num_kept < len(kv.columns):
            self._owner.keep(kv, num_kept)


def lacking(group: GroupKV) -> int:
    """Return how many blocks a group on its way back has not taken yet."""
    assert group.restore is not None
    return len(group.row) - group.first - len(group.restore.targets)
