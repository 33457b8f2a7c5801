"""Trunks: what requests begin with that they have once in the pool, by the executor's rules.

A request that begins, or comes back, looks for its leading columns in the pool. It *joins* a
trunk; where the columns are part of some request's own, or of a longer trunk, that is *split*. A
trunk ends with its last user. What a step fills is joined from when it is scheduled, before it is
on the host.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from services.control.counters import Counters
from services.control.prefixes.prefix_cache import Column, num_alike
from services.control.prefixes.shared_prefixes import Stretch
from services.control.prefixes.trunks import Sharing, give_up, own_columns, put_before, stretches
from services.placement.blocks import BlockGeometry
from services.placement.types import RequestId
from simulator.device.copies import CopyJob
from simulator.memory.kv import KVState, Trunk
from simulator.memory.pool import PoolLedger


class Trunks(Sharing):
    """All trunks of an engine, and the ends of holders."""

    def __init__(self, pool: PoolLedger, counters: Counters, geometry: BlockGeometry) -> None:
        super().__init__(block_size=geometry.block_size)
        self.all: dict[Trunk, None] = {}
        self._pool, self._counters, self._geometry = pool, counters, geometry
        self._last_number = 0

    # -- users come and go -----------------------------------------------------------------------

    def join(self, kv: KVState) -> None:
        """Let a request that is asleep begin with what others have in the pool."""
        assert kv.asleep
        assert not kv.trunks
        if not self.is_on:
            return
        chain = [
            holder
            if isinstance(holder, Trunk) and holder.num_rows == end
            else self._split(holder, end)
            for holder, end in self.holders_along(kv.columns, but=kv)
        ]
        for trunk in chain:
            trunk.users[kv] = None
        kv.trunks, kv.first = chain, chain[-1].num_rows if chain else 0
        self._counters.num_trunk_joins += bool(chain)

    def end(self, kv: KVState) -> None:
        """Take all blocks of a request back; others may find the KV of its columns in them."""
        self._let_go(kv)
        self.leave(kv)

    def leave(self, kv: KVState) -> None:
        """Take a request whose KV ends from its trunks."""
        for trunk in reversed(kv.trunks):
            del trunk.users[kv]
            if not trunk.users:
                trunk.cancel_copies()
                self._let_go(trunk)
                del self.all[trunk]
        kv.trunks = []

    def _let_go(self, holder: KVState) -> None:
        give_up(holder)
        self._pool.release(RequestId(holder.request_id))
        resident = frozenset(range(self._geometry.num_groups)).difference(holder.offloaded)
        copied = holder.columns[holder.first : holder.num_copied_blocks]
        self._pool.leave([column.uid for column in copied], resident)

    def wake(self, kv: KVState) -> bool:
        """Give a request and its trunks staging; False, and nothing changed, if blocks lack."""
        asleep = [holder for holder in (*kv.trunks, kv) if holder.asleep]
        num_to_wake = sum(holder.num_to_wake for holder in asleep)
        if num_to_wake > self._pool.num_free:
            return False
        for holder in asleep:  # a buffer each, before any gets a second one
            num_to_wake -= holder.num_to_wake
            holder.wake(num_free=self._pool.num_free - num_to_wake)
            self.refresh(holder)
        return True

    def refresh(self, holder: KVState) -> None:
        """Let the ledger follow a change of a holder that finds its blocks free."""
        owner, num_side = RequestId(holder.request_id), holder.num_side_blocks
        taken = self._pool.set_owned(owner, holder.num_owned + num_side, num_side=num_side)
        assert taken, "blocks were taken that were not free"

    # -- what requests have in common ------------------------------------------------------------

    def stretches(self, kv: KVState) -> list[Stretch]:
        """Return what a request begins with: its trunks, and what others may share of its own."""
        if kv.is_parked:
            return self.found(kv.columns)
        return stretches(kv, len(kv.columns) if self.is_on else 0)

    def reached(self, cached: Sequence[Column], filled: Iterable[Column]) -> Sequence[Column]:
        """Return what is cached, and of what is filled behind it what a request will share."""
        columns = (*cached, *filled) if self.is_on else cached
        if len(columns) == len(cached):
            return cached
        return columns[: max(len(cached), self.num_shared(columns))]

    # -- splits ----------------------------------------------------------------------------------

    def _split(self, holder: KVState, end: int) -> Trunk:
        """Make what a holder has before `end` a trunk of its users'."""
        self._last_number += 1
        trunk = _cut(holder, end, f"\0trunk-{self._last_number}")
        self.all[trunk] = None
        self._counters.num_trunk_splits += 1
        put_before(holder, trunk, users_of(holder))
        for column in own_columns(trunk):
            column.holder = trunk
        for part in (holder, trunk):
            part.seal()
            self.refresh(part)
        return trunk

    # -- integrity -------------------------------------------------------------------------------

    def check_integrity(self, kvs: Iterable[KVState]) -> None:
        """Raise AssertionError unless users have their trunks one behind the other."""
        num_uses = 0
        for kv in kvs:
            first = 0
            for trunk in kv.trunks:
                assert trunk in self.all
                assert kv in trunk.users
                assert trunk.first == first
                first = trunk.num_rows
                assert num_alike(kv.columns, trunk.columns) == first
            assert kv.first == first
            num_uses += len(kv.trunks)
        assert num_uses == sum(len(trunk.users) for trunk in self.all)
        for trunk in self.all:
            assert trunk.users
            assert trunk.num_rows == len(trunk.columns) == trunk.num_full_blocks
            assert trunk.mirrored == (trunk.num_copied_blocks == trunk.num_rows)
            assert trunk.mirrored or not (trunk.offloaded or trunk.asleep)
            assert trunk.num_owned == self._pool.owned[RequestId(trunk.request_id)]
            trunk.check_integrity()


def users_of(holder: KVState) -> list[KVState]:
    """Return the requests that begin with a trunk, or the one whose own part a holder is."""
    return list(holder.users) if isinstance(holder, Trunk) else [holder]


def _cut(holder: KVState, end: int, name: str) -> Trunk:
    """Take from a holder what it has before `end`; no block moves.

    Groups on their way back are given up, and begin anew where the holder waits for them; unless
    nothing is left of it: then the trunk comes back, and the rest is there.
    """
    coming = sorted({*holder.restoring, *holder.lacking})
    is_all = end == holder.num_rows
    if not is_all:
        holder.cancel_restores()
        holder.lacking = coming if holder.asleep else []
    trunk = Trunk(
        request_id=name,
        geometry=holder.geometry,
        num_tokens=end * holder.geometry.block_size,
        first=holder.first,
        offloaded=holder.offloaded,
        own=tuple(position for position in holder.own if position < end),
        num_buffers=holder.num_buffers,
        buffer_length=min(holder.buffer_length, end),
        wanted_buffers=holder.wanted_buffers,
        asleep=holder.asleep,
        mirrored=holder.num_copied_blocks >= end,
        num_copied_blocks=min(end, holder.num_copied_blocks),
        num_sent_blocks=min(end, holder.num_sent_blocks),
        saves=_cut_saves(holder, end),
        columns=holder.columns[:end],
        restoring=holder.restoring,
        lacking=list(holder.lacking),
        floor=holder.floor if isinstance(holder, Trunk) else None,
    )
    holder.first, holder.restoring = end, {}
    holder.own = tuple(position for position in holder.own if position >= end)
    holder.buffer_length = max(holder.buffer_length, end)
    holder.num_copied_blocks = max(holder.num_copied_blocks, end)
    holder.num_sent_blocks = max(holder.num_sent_blocks, end)
    if isinstance(holder, Trunk):
        holder.mirrored = holder.num_copied_blocks == holder.num_rows
    if is_all and coming:
        holder.lacking = []
        holder.flip(coming)
    return trunk


def _cut_saves(holder: KVState, end: int) -> deque[tuple[CopyJob, int]]:
    """Take from a holder the copies to the host that are under way of what is before `end`.

    One that has some of both parts is waited for by both.
    """
    front, back = deque[tuple[CopyJob, int]](), deque[tuple[CopyJob, int]]()
    first = holder.num_copied_blocks
    for job, upto in holder.saves:
        if first < end:
            front.append((job, min(upto, end)))
        if upto > end:
            back.append((job, upto))
        job.num_users += first < end < upto
        first = upto
    holder.saves = back
    return front
