"""The life of every KV block: where blocks begin, move between uses, and end.

A block begins in `Growth.grow` (a token needs room), in `StagingBuffers` (a second buffer) or in
`Restores.begin` (a target). It moves in `Seals`, when the host copy of an offloaded group's full
block is complete: the block becomes staging, or is given back. It ends in `PoolBlocks.release`
(sealed, trimmed), or when its request is freed. `PoolBlocks` is how blocks are taken and
given back, and what may still be found in them; `Quarantine` keeps some from being taken.

Everything here is bookkeeping of the scheduler; the orders that follow from it go to the ranks
with the next step, and each rank carries out steps one after the other.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from services.control.prefixes.prefix_cache import Column, num_complete
from services.control.prefixes.trunks import give_up
from services.control.requests.request_record import RequestRecord
from services.executor.blocks.failures import may_mirror
from services.executor.blocks.growth import Growth
from services.executor.blocks.holder import GroupKV, Holder
from services.executor.blocks.host_pool import HostPool
from services.executor.blocks.kept.late_copies import LateCopies
from services.executor.blocks.kept.returns import Returns
from services.executor.blocks.pool_blocks import PoolBlocks
from services.executor.blocks.quarantine import Quarantine
from services.executor.blocks.residency import RequestKV, on_host_only
from services.executor.blocks.restores import Restores
from services.executor.blocks.seals import Seals
from services.executor.blocks.sharing.publishing import Publishing
from services.executor.blocks.sharing.trunks import Trunks, leave_found
from services.executor.blocks.sides.side_copies import SideCopies
from services.executor.blocks.sides.side_groups import SideGroups
from services.executor.blocks.staging import StagingBuffers
from services.executor.blocks.step_orders import StepOrders
from services.executor.blocks.uncached import UncachedPrefixes
from services.placement.blocks import BlockGeometry
from services.placement.layer_placement import LayerPlacement


class BlockOwner:
    """Owns the KV blocks and host slots of all requests.

        kv = owner.draft(record, placement, num_slots=32, keys=keys)  # no block is taken yet
        owner.adopt(kv)
        owner.growth.grow(kv, num_tokens=200, num_accepted=200)
        owner.offload(kv, [1, 3])  # these layer groups leave the pool as their copies complete
        owner.restores.begin(kv, 3)  # one comes back
        owner.park(kv)  # all of it leaves the pool; `forget`: and the host

    Each change is complete when it returns; the ranks are told with the next step's orders.
    """

    def __init__(
        self,
        pool: BlockPool,
        host: HostPool,
        geometry: BlockGeometry,
        records: Mapping[str, RequestRecord[RequestKV]],
        *,
        poison_freed: bool = False,
    ) -> None:
        """`records`: of all live requests."""
        self.pool = pool
        self.host = host
        self.geometry = geometry
        self.orders = orders = StepOrders()
        self.records = records
        self.kvs: dict[RequestKV, None] = {}  # that there are, in the order of admission
        self.counters = host.counters
        self._generations = count(1)
        self.blocks = PoolBlocks(pool, orders, host.cache.lose, poison_freed=poison_freed)
        self.quarantine = Quarantine(self.blocks, host)
        self.staging = StagingBuffers(self.blocks, orders)
        self.restores = Restores(self.blocks, orders, self.staging, self.counters)
        self.returns = Returns(self.restores, host, geometry.num_groups)
        self.late_copies = LateCopies(self.blocks, orders, host, geometry.num_groups)
        self.sides = SideGroups(self.blocks, geometry)
        self.side_copies = SideCopies(self.sides, host, self.restores, geometry)
        self.growth = Growth(self.blocks, host, self.staging, block_size=geometry.block_size)
        self.uncached = UncachedPrefixes(self.blocks, orders, self.staging)
        self.seals = Seals(self.blocks, orders, self.staging, self.counters)
        self.trunks = Trunks(self.restores, self.seals, host, geometry)
        self.publishing = Publishing(host, self.growth, self.trunks)

    def holders(self) -> Iterator[Holder]:
        """Return all that blocks may belong to: requests, and trunks that they share."""
        return chain(self.kvs, self.trunks.all)

    def is_live(self, holder: Holder) -> bool:
        """Return whether a holder has not ended."""
        return holder in self.kvs or holder in self.trunks.all

    # -- a request's beginning and end ------------------------------------------------------

    def draft(
        self,
        record: RequestRecord[RequestKV],
        placement: LayerPlacement,
        *,
        num_slots: int,
        keys: Sequence[BlockHash] = (),
    ) -> RequestKV:
        """Return a request without blocks, with `num_slots` reserved on the host if they fit.

        They may take the place of parked requests, which keep their copies until `adopt`.

        A request that gets no room is not mirrored and stays resident, whatever its placement. A
        draft is made real by `adopt`, or thrown away by `discard`.
        """
        mirrored = may_mirror(record) and self._can_reserve(num_slots)
        kv = RequestKV(
            record=record,
            groups=[GroupKV() for _ in range(self.geometry.num_groups)],
            mirrored=mirrored,
            block_size=self.geometry.block_size,
            wanted_staging=placement.num_staging,
            keys=keys,
        )
        if mirrored:
            self.host.reserve_unbacked(kv.promise, num_slots)
        if mirrored and placement.offloaded:
            for index in placement.offloaded:
                kv.groups[index].offloaded = True
            kv.staging = [[] for _ in range(min(placement.num_staging, len(placement.offloaded)))]
            for ordinal, index in enumerate(kv.offloaded):
                kv.groups[index].buffer = ordinal % len(kv.staging)
        return kv

    def adopt(self, kv: RequestKV) -> None:
        """Take a draft in."""
        assert kv.record.kv is None
        if kv.mirrored:
            dropped = self.drop_parked(-self.host.num_unpromised)
            assert dropped, "parked requests that were to be dropped are gone"
            self.host.back(kv.promise)
        self._put(kv)
        kv.generation = next(self._generations)
        if kv.staging:
            self.orders.set_staging(kv.request_id, len(kv.staging))
            for index in kv.offloaded:
                self.orders.replace_table((kv.request_id, index), kv.groups[index].buffer)
        self.publishing.expect(kv)

    def _put(self, kv: RequestKV) -> None:
        kv.record.kv = kv
        self.kvs[kv] = None

    def discard(self, kv: RequestKV) -> None:
        self.host.withdraw(kv.promise)

    def pop(self, kv: RequestKV) -> list[KVCacheBlock]:
        """Forget a request's KV and return its blocks; the caller gives them to the pool.

        Targets of a running restore are not among them: a rank may still write to them. Nor are the
        blocks that it leaves to whoever begins with its columns.
        """
        self._leave(kv)
        return self._end(kv)

    def _end(self, kv: RequestKV, *, num_kept: int = 0) -> list[KVCacheBlock]:
        """The ranks remember where its first `num_kept` positions are on the host."""
        kv.record.kv = None
        kv.record.put_back()
        del self.kvs[kv]
        for index in range(len(kv.groups)):
            self.restores.cancel(kv, index)
        self.side_copies.forget(kv)
        blocks = [*kv.owned_blocks(), *self.trunks.leave(kv)]
        self.uncached.forget(kv)
        self._give_back_slots(kv)
        self.orders.drop_request(kv.request_id, num_kept=num_kept)
        self.blocks.poison(blocks)
        return [*blocks, *self.sides.pop(kv.request_id)]

    def _leave(self, kv: RequestKV) -> None:
        """Let others find the KV of its columns in the blocks where it is.

        What each step computes anew is in none, and what the next one would have kept not yet. Nor
        is what was lost.
        """
        give_up(kv)
        self.publishing.end(kv)
        first = max(kv.num_recomputed, kv.first)
        leave_found(self.blocks, kv, range(first, len(kv.columns) if kv.keys else 0))

    def _give_back_slots(self, kv: RequestKV, *, but: int = 0) -> None:
        """Give up a request's room on the host, `but` for its first columns."""
        self.host.give_back(kv.own_slots())
        self.host.release(kv.columns[but:])
        self.host.withdraw(kv.promise)

    def forget(self, kv: RequestKV) -> None:
        """End the KV of a request that is not running, and its host copies."""
        self.pool.free_blocks(self.pop(kv))

    def park(self, old: RequestKV) -> list[KVCacheBlock]:
        """Take a request out of the pool and return its blocks, as `pop`; keep its host copies.

        What has no complete copy in every group is forgotten; without any copy, all of it is, or
        without the one of windows and states that follows them.
        """
        num_kept = old.num_host_blocks if old.mirrored else 0
        if not self.side_copies.is_kept(old) or not (num_kept or old.num_side_tokens):
            return self.pop(old)
        # A new object: copies under way of the old one, beyond what is kept, mean nothing.
        kept = [group.host_slots[:num_kept] for group in old.groups]
        parked = on_host_only(old, kept, null=self.blocks.null)
        self.side_copies.hand_over(old, parked)
        self._leave(old)  # while its columns say what is in its blocks
        parked.columns, old.columns = old.columns[:num_kept], old.columns[num_kept:]
        if old.columns:  # others may have what is computed again
            parked.generation = next(self._generations)
        for group in old.groups:
            del group.host_slots[:num_kept]
        others_saved = bool(old.trunks)
        blocks = self._end(old, num_kept=num_kept)
        self._put(parked)
        if others_saved:
            self.orders.begin_with(parked)
        return blocks

    # -- the prefix cache -------------------------------------------------------------------

    def adopt_prefix(
        self,
        record: RequestRecord[RequestKV],
        columns: Sequence[Column],
        keys: Sequence[BlockHash],
    ) -> None:
        """Let a request that waits have those columns that are on the host, as if it were parked.

        The others it may share when it is its turn, if they are there still.
        """
        assert record.kv is None
        columns = columns[: num_complete(columns)]
        self.host.cache.share(columns)
        nothing = RequestKV(
            record=record,
            groups=[],
            mirrored=True,
            block_size=self.geometry.block_size,
            generation=next(self._generations),
            keys=keys,
            columns=list(columns),
        )
        slots = [[c.slots[index] for c in columns] for index in range(self.geometry.num_groups)]
        kv = on_host_only(nothing, slots, null=self.blocks.null)
        self._put(kv)
        self.orders.begin_with(kv)

    def keep(self, kv: RequestKV, num_kept: int) -> None:
        """Forget what a request that is asleep has behind its first `num_kept` blocks."""
        kv.generation = next(self._generations)  # what is computed now is other KV
        give_up(kv)
        self._give_back_slots(kv, but=num_kept)
        kv.num_tokens = num_kept * kv.block_size
        del kv.columns[num_kept:]
        for group in kv.groups:
            assert not group.own
            del group.host_slots[num_kept:], group.row[num_kept:]
            group.num_saves_sent = group.num_host_blocks = num_kept
        self.orders.begin_with(kv)

    def forget_prefixes(self) -> None:
        """Let no request begin with what is on the host now, nor with what follows from it."""
        self.forget_found()
        for kv in self.kvs:
            kv.keys = ()
            self.publishing.end(kv)
        for trunk in self.trunks.all:
            trunk.is_found = False

    def forget_found(self) -> None:
        """Let no request find what is on the host or in free blocks."""
        self.returns.forget_all()
        self.late_copies.forget_all()
        self.host.forget_all()
        self.blocks.forget_left()

    # -- host room --------------------------------------------------------------------------

    def reserve(self, kv: RequestKV, num_slots: int) -> bool:
        """Promise host slots to a request, at the cost of parked ones; False if there are none.

        The request itself may be a parked one: it keeps its copies.
        """
        missing = num_slots - self.host.num_unpromised
        dropped = self.drop_parked(missing, but=kv)
        return dropped and self.host.reserve(kv.promise, num_slots)

    def _can_reserve(self, num_slots: int) -> bool:
        """Return whether `reserve` would succeed."""
        num_missing = num_slots - self.host.num_unpromised
        return num_missing <= 0 or num_missing <= sum(
            kv.num_slots_of_its_own for kv in self.kvs if kv.is_parked
        )

    def drop_parked(self, num_slots: int, *, but: RequestKV | None = None) -> bool:
        """Give up host copies of parked requests, shortest first, for at least `num_slots` slots.

        False, and nothing changed, if they do not hold as many. The request `but` keeps its own.
        """
        if num_slots <= 0:
            return True
        parked = sorted(
            (kv for kv in self.kvs if kv.is_parked and kv is not but),
            key=lambda kv: kv.num_tokens,
        )
        if sum(kv.num_slots_of_its_own for kv in parked) < num_slots:
            return False
        for kv in parked:
            if num_slots <= 0:
                break
            num_slots -= kv.num_slots_of_its_own
            self.pop(kv)
            self.counters.num_dropped_copies += 1
        return True

    def prepare_save(self, kv: Holder, group: GroupKV, num_full: int) -> bool:
        """Give all full blocks of a group a slot; False if the host pool is full."""
        if not isinstance(kv, RequestKV):  # a trunk's slots are its columns'
            return True
        return kv.mirrored and self.growth.take_slots(kv, group, num_full)

    def unmirror(self, kv: RequestKV) -> None:
        """Forget the host copies of a resident request's own part, for good."""
        assert not kv.offloaded, f"{kv.request_id} is partly on the host only"
        give_up(kv)
        self._give_back_slots(kv, but=kv.num_shared)
        del kv.columns[kv.num_shared :]
        for group in kv.groups:
            del group.host_slots[kv.num_shared :]
            group.num_saves_sent = group.num_host_blocks = kv.num_shared
        kv.mirrored = False

    # -- offload ----------------------------------------------------------------------------

    def offload(self, kv: Holder, groups: Iterable[int]) -> None:
        """Make groups offloaded. Blocks whose host copy is complete are given back at once.

        The others follow in `seal` as their copies complete. A group that is being restored stays
        where it is.
        """
        assert kv.mirrored, f"{kv.request_id} has no room on the host"
        for index in groups:
            group = kv.groups[index]
            if group.offloaded:
                self.restores.cancel(kv, index)
                continue
            self.orders.forget_found((kv.request_id, index))
            group.offloaded = True
            group.own = dict(enumerate(group.row[group.first :], group.first))
            group.buffer = -1
        self.staging.assign(kv)
        self.seal(kv)

    def seal(self, kv: Holder) -> None:
        """Give up own blocks of offloaded groups whose host copies are complete."""
        self.seals.seal(kv)

    # -- integrity --------------------------------------------------------------------------

    def check_integrity(self, num_deferred: int = 0, drafts: Iterable[RequestKV] = ()) -> None:
        """Assert that every block and slot has one owner, and none is lost.

        `num_deferred` blocks are popped and wait for steps in flight to end; `drafts` are neither
        adopted nor discarded yet.
        """
        owned, returning = self.returns.check_integrity()
        copied, copying, slots = self.late_copies.check_integrity()
        owned.extend(chain(copied, self.sides.check_integrity(), *self.restores.orphans.values()))
        self.side_copies.check_integrity(self.kvs)
        for kv in self.kvs:
            assert kv.record.kv is kv
            kv.check_integrity()
            assert bool(kv.num_recomputed) == (kv in self.uncached.kvs)
        self.trunks.check_integrity(self.kvs)
        owned.extend(block for holder in self.holders() for block in holder.owned_blocks())
        assert len({block.block_id for block in owned}) == len(owned), "a block is owned twice"
        assert all(block.ref_cnt == 1 + self.quarantine.num_references(block) for block in owned), (
            "an owned block is free or shared"
        )
        num_usable = self.pool.num_gpu_blocks - 1  # vLLM keeps one as the null block
        num_free = self.pool.get_num_free_blocks()
        num_held = self.quarantine.num_unowned_blocks
        assert num_free + len(owned) + num_deferred + num_held == num_usable, (
            f"{num_usable} blocks: {num_free} free, {len(owned)} owned, {num_deferred} deferred, "
            f"{num_held} in quarantine"
        )
        self.blocks.check_integrity()
        self.host.check_integrity(
            [*slots, *(slot for kv in self.kvs for slot in (*kv.own_slots(), *kv.side_slots))],
            [kv.promise for kv in (*self.kvs, *drafts)],
            [returning, copying, *(kv.columns for kv in self.kvs)],
            [kv.side_copy.anchor for kv in self.kvs if kv.side_copy and kv.side_copy.anchor],
        )
