"""Trunks: requests that begin alike have that part of their KV once in the pool, not each.

    A  |--- trunk ---|----- own -----          A ran first, and had all of it
    B  |--- trunk ---|-- own --

A request that begins, or comes back, looks who has its leading columns in the pool, or is loading
them. It *joins* a trunk; where the columns are part of some request's own, or of a longer trunk,
that is *split*: the part in front becomes a trunk of its users'. Blocks do not move and their ids
do not change, so that steps in flight and rows see nothing of it. A trunk ends with its last user,
and may leave the pool and come back as a request's own part may.

Only what is on the host is shared (`Column.holder`); new tokens land behind it.
"""

from collections.abc import Iterable, Sequence

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.control.counters import Counters
from services.control.prefix_cache import Column
from services.control.requests.life import State
from services.control.shared_prefixes import Stretch
from services.control.trunks import (
    MIN_TRUNK_TOKENS,
    found,
    give_up,
    holders_along,
    num_alike,
    num_least_blocks,
    own_columns,
    stretches,
)
from services.executor.blocks.holder import GroupKV, Holder, Restore
from services.executor.blocks.pool_blocks import PoolBlocks
from services.executor.blocks.residency import RequestKV, Trunk
from services.executor.blocks.restores import Restores
from services.executor.blocks.seals import Seals


class Trunks:
    """All trunks of an engine."""

    def __init__(
        self,
        restores: Restores,
        seals: Seals,
        counters: Counters,
        *,
        block_size: int,
    ) -> None:
        self.all: dict[Trunk, None] = {}
        self.is_on = True
        self.min_tokens = MIN_TRUNK_TOKENS
        self._restores, self._seals, self._counters = restores, seals, counters
        self._blocks, self._orders = restores.blocks, restores.orders
        self._staging = restores.staging
        self._block_size = block_size
        self._last_number = 0

    # -- users come and go --------------------------------------------------------------------

    def join(self, kv: RequestKV) -> None:
        """Let a request that is on the host only begin with what others have in the pool."""
        assert kv.asleep
        assert not kv.trunks
        if not self.is_on or not kv.keys:
            return
        chain: list[Trunk] = []
        for holder, end in holders_along(kv.columns, self._num_least, but=kv):
            if isinstance(holder, Trunk) and holder.end == end:
                chain.append(holder)
            else:
                chain.append(self._split(holder, end))
        for trunk in chain:
            trunk.users[kv] = None
            self._tell_users(trunk)
        kv.trunks = chain
        for group in kv.groups:
            group.first = kv.num_shared
        self._counters.num_trunk_joins += bool(chain)

    @property
    def _num_least(self) -> int:
        """Return how many blocks of a row are shared at least."""
        return num_least_blocks(self._block_size, min_tokens=self.min_tokens)

    def leave(self, kv: RequestKV) -> list[KVCacheBlock]:
        """Take a request from its trunks; return the blocks of those that end and are not found.

        The caller gives them to the pool.
        """
        blocks = []
        for trunk in reversed(kv.trunks):
            del trunk.users[kv]
            if trunk.users:
                self._tell_users(trunk)
            else:
                blocks.extend(self._end(trunk))
        if kv.trunks:
            kv.trunks = []
            for group in kv.groups:
                group.first = 0
        return blocks

    def num_to_wake(self, kv: RequestKV) -> int:
        """Return how many blocks `wake` takes."""
        return sum(map(self._staging.num_to_wake, (*kv.trunks, kv)))

    def wake(self, kv: RequestKV) -> bool:
        """Give a request and its trunks staging; False, and nothing changed, if blocks lack."""
        if self.num_to_wake(kv) > self._blocks.num_free:
            return False
        asleep = [holder for holder in (*kv.trunks, kv) if holder.asleep]
        for holder in asleep:  # a buffer each, before any gets a second one
            self._staging.begin(holder)
        for holder in asleep:
            self._staging.assign(holder)
        return True

    def _end(self, trunk: Trunk) -> list[KVCacheBlock]:
        give_up(trunk)
        if trunk.is_found:
            leave_found(self._blocks, trunk, range(trunk.first, trunk.end))
        for index in trunk.restoring:
            self._restores.cancel(trunk, index)
        self._orders.drop_request(trunk.name)
        del self.all[trunk]
        return trunk.owned_blocks()

    def _tell_users(self, trunk: Trunk) -> None:
        self._orders.use(trunk.name, [user.request_id for user in trunk.users])

    # -- what requests have in common ---------------------------------------------------------

    @property
    def num_saved_blocks(self) -> int:
        """Return how many blocks more there would be if each user had its own."""
        return sum(trunk.num_owned * (len(trunk.users) - 1) for trunk in self.all)

    def stretches(self, kv: RequestKV) -> list[Stretch]:
        """Return what a request begins with: its trunks, and what others may share of its own."""
        return stretches(kv, self._num_least, may_share=self.is_on and bool(kv.keys))

    def found(self, columns: Sequence[Column]) -> list[Stretch]:
        """Return whose the leading columns are that a request will begin with."""
        return found(columns, self._num_least) if self.is_on else []

    # -- splits -------------------------------------------------------------------------------

    def _split(self, holder: Holder, end: int) -> Trunk:
        """Make what a holder has before `end` a trunk of its users'."""
        was_coming = self._stop_restores(holder, end)
        self._last_number += 1
        trunk = Trunk(
            name=f"\0trunk-{self._last_number}",
            groups=[self._cut(group, end) for group in holder.groups],
            mirrored=True,
            block_size=holder.block_size,
            wanted_staging=holder.wanted_staging,
            columns=holder.columns[:end],
            staging=[buffer[:end] for buffer in holder.staging],
            num_tokens=end * holder.block_size,
            asleep=holder.asleep,
            users={},
            floor=holder.floor if isinstance(holder, Trunk) else None,
        )
        self._clear_staging(holder, end)
        self.all[trunk] = None
        self._counters.num_trunk_splits += 1
        self._put_before(holder, trunk)
        for column in own_columns(trunk):
            column.holder = trunk
        self._tell_ranks(holder, trunk)
        for index in was_coming:
            for part in (trunk, holder):
                self._restores.begin_in_parts(part, index)
        self._complete_empty(holder)
        for part in (trunk, holder):
            self._seals.seal(part)
        return trunk

    def _clear_staging(self, holder: Holder, end: int) -> None:
        """Let a holder's buffers show nothing before `end`; on the ranks what is there is void."""
        nothing = [self._blocks.null] * end
        for number, buffer in enumerate(holder.staging):
            is_short = len(buffer) < end
            buffer[:end] = nothing
            if is_short:
                ids = (block.block_id for block in nothing)
                self._orders.fill_staging(holder.request_id, number, 0, ids)

    def _stop_restores(self, holder: Holder, end: int) -> list[int]:
        """Give up the copies of groups that come back in part; return those to begin anew.

        Where all of a holder becomes the trunk, they go on.
        """
        coming = holder.restoring if end < holder.num_rows else []
        for index in coming:
            self._restores.cancel(holder, index)
        is_on_its_way = holder.asleep and any(u.record.is_prepared for u in users_of(holder))
        return coming if is_on_its_way else []

    def _cut(self, group: GroupKV, end: int) -> GroupKV:
        """Take from a group what is before `end`."""
        null = self._blocks.null
        front = GroupKV(
            row=group.row[:end],
            first=group.first,
            offloaded=group.offloaded,
            own={
                position: group.own.pop(position)
                for position in sorted(group.own)
                if position < end
            },
            host_slots=group.host_slots[:end],
            num_saves_sent=end,
            num_host_blocks=end,
            restore=group.restore,
            num_failed_restores=group.num_failed_restores,
            restore_from_step=group.restore_from_step,
            buffer=group.buffer,
        )
        group.row[:end] = [null] * end
        group.first = end
        if group.restore is not None:
            group.restore = Restore()
        return front

    def _put_before(self, holder: Holder, trunk: Trunk) -> None:
        """Let a new trunk stand before what it was cut from, in all requests that had that."""
        for user in users_of(holder):
            at = user.trunks.index(holder) if isinstance(holder, Trunk) else len(user.trunks)
            user.trunks.insert(at, trunk)
            trunk.users[user] = None

    def _tell_ranks(self, holder: Holder, trunk: Trunk) -> None:
        """Say of both parts all that ranks must know: what was pending of the whole is void."""
        orders = self._orders
        orders.split(holder.request_id, trunk.name, trunk.end)
        slots = [group.host_slots for group in trunk.groups]
        orders.begin_with(trunk.name, trunk.columns, slots)
        if not trunk.staging:
            return
        orders.set_staging(trunk.name, len(trunk.staging))
        for number, buffer in enumerate(trunk.staging):
            ids = [block.block_id for block in buffer]
            orders.fill_staging(trunk.name, number, 0, ids)
        for index in trunk.offloaded:
            self._staging.load_anew(trunk, index)
            self._staging.load_anew(holder, index)

    def _complete_empty(self, holder: Holder) -> None:
        """Take in that nothing of a holder is left to come back."""
        for index in holder.restoring if holder.num_rows == holder.first else ():
            self._restores.complete(holder, index)

    # -- integrity ----------------------------------------------------------------------------

    def check_integrity(self, kvs: Iterable[RequestKV]) -> None:
        """Assert that each user has its trunks one behind the other, and they are what it has."""
        num_uses = 0
        for kv in kvs:
            first = 0
            for trunk in kv.trunks:
                assert trunk in self.all, "a request begins with a trunk that has ended"
                assert kv in trunk.users, "a trunk does not know its user"
                assert trunk.first == first, "trunks do not meet"
                own, its = (one.columns[first : trunk.end] for one in (kv, trunk))
                assert num_alike(own, its) == trunk.end - first, "a user has another's KV"
                runs = kv.record.state is State.RUNNING
                assert not (runs and trunk.asleep), "a trunk sleeps while its user runs"
                first = trunk.end
            num_uses += len(kv.trunks)
            for position, column in enumerate(kv.columns[first:], first):
                holder = column.holder
                assert holder is None or holder.columns[position] is column, "held by another"
                is_its = holder is None or holder.first <= position or holder.scratch
                assert is_its, "held by none"
        assert num_uses == sum(len(trunk.users) for trunk in self.all), "a user has ended"
        for trunk in self.all:
            trunk.check_integrity()
            columns, last = own_columns(trunk), self._num_least - 1
            is_short = len(columns) <= last  # as what a split leaves may be
            assert is_short or columns[last].holder is trunk, "a trunk is not found"


def users_of(holder: Holder) -> list[RequestKV]:
    """Return the requests that begin with a trunk, or the one whose own part a holder is."""
    if isinstance(holder, Trunk):
        return list(holder.users)
    assert isinstance(holder, RequestKV)
    return [holder]


def leave_found(blocks: PoolBlocks, holder: Holder, positions: range) -> None:
    """End the life of a holder's blocks at these positions; others may find their KV in them."""
    held = [group.hand_over(positions) for group in holder.groups]
    uids = (holder.uid(position) for position in positions)
    left = list(zip(uids, zip(*held, strict=True), strict=True))
    blocks.leave(reversed(left))  # the last ones are taken first
