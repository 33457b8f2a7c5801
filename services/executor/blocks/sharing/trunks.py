"""Trunks: requests that begin alike have that part of their KV once in the pool, not each.

    A  |--- trunk ---|----- own -----          A ran first, and had all of it
    B  |--- trunk ---|-- own --

A request that begins, or comes back, looks what has its leading columns in the pool, or is loading
them (`Column.holder`). It *joins* a trunk; where the columns are part of some request's own, or of
a longer trunk, that is *split*: the part in front becomes a trunk of its users'. Blocks do not move
and their ids do not change, so that steps in flight and rows see nothing of it. A trunk ends with
its last user, and may leave the pool and come back as a request's own part may.

A block can be shared from the moment on at which the step that fills it is scheduled. While it is
not complete on the host, it is so as long as its holder has all layers in the pool.

What a trunk, or a request, leaves in the pool when it ends becomes a trunk again of a request that
begins with it, until others take the blocks: that needs no copy on the host.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import islice, takewhile

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from services.control.prefixes.prefix_cache import Column, FoundPrefix, num_alike, num_complete
from services.control.prefixes.shared_prefixes import Stretch
from services.control.prefixes.trunks import Sharing, give_up, hold, own_columns, stretches
from services.control.requests.life import State
from services.executor.blocks.holder import GroupKV, Holder
from services.executor.blocks.host_pool import HostPool, SlotPromise
from services.executor.blocks.pool_blocks import PoolBlocks
from services.executor.blocks.residency import RequestKV, Trunk
from services.executor.blocks.restores import Restores
from services.executor.blocks.seals import Seals
from services.executor.blocks.sharing.splits import Splits
from services.executor.step_messages import FoundOrder
from services.placement.blocks import BlockGeometry


class Trunks(Sharing):
    """All trunks of an engine."""

    def __init__(
        self,
        restores: Restores,
        seals: Seals,
        host: HostPool,
        geometry: BlockGeometry,
    ) -> None:
        super().__init__(block_size=geometry.block_size)
        self._num_groups = geometry.num_groups
        self.all: dict[Trunk, None] = {}
        self.splits = Splits(restores, seals)
        self._restores = restores
        self._host, self._counters = host, host.counters
        self._blocks, self._orders = restores.blocks, restores.orders
        self._staging = restores.staging

    # -- users come and go --------------------------------------------------------------------

    def join(self, kv: RequestKV) -> None:
        """Let a request that is on the host only begin with what others have in the pool.

        Or with what was left there, as far as that reaches behind what it has on the host.
        """
        assert kv.asleep
        assert not kv.trunks
        if not self.is_on or not kv.keys:
            return
        self._begin_as_cached(kv)
        chain: list[Trunk] = []
        for holder, end in self.holders_along(kv.columns, but=kv):
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
        if len(kv.columns) > max(kv.num_shared, num_complete(kv.columns)):
            self.revive(kv)

    def revive(self, kv: RequestKV) -> None:
        """Make a trunk of what free blocks hold behind what a request shares, if it is enough."""
        first, end = kv.num_shared, _end_left(kv.columns, kv.num_shared)
        if end - first < self.num_least or not self.is_on:
            return
        columns = kv.columns[first:end]
        num_copied = first + num_complete(columns)
        uids = [column.uid for column in columns]
        trunk = Trunk(
            name=self.splits.new_name(),
            groups=[
                GroupKV(
                    row=[*group.row[:first], *self._blocks.find_all(uids, index)],
                    first=first,
                    host_slots=group.host_slots[:end],
                    num_saves_sent=num_copied,
                    num_host_blocks=num_copied,
                )
                for index, group in enumerate(kv.groups)
            ],
            mirrored=num_copied == end,
            block_size=self._block_size,
            columns=kv.columns[:end],
            num_tokens=end * self._block_size,
            users={kv: None},
        )
        self._counters.num_found_blocks += trunk.num_owned
        self.all[trunk] = None
        kv.trunks.append(trunk)
        for group in kv.groups:
            group.first = end
        hold(trunk)
        self.splits.on_split(kv, trunk)
        self._orders.begin_with(trunk)
        self._tell_users(trunk)
        self._tell_found(trunk)

    def _tell_found(self, trunk: Trunk) -> None:
        """Let the ranks compare blocks that were found with what was copied of them."""
        copied = range(trunk.first, trunk.num_copied_blocks)
        uids = [trunk.uid(position) for position in copied]
        for index, group in enumerate(trunk.groups if uids else ()):
            ids = [block.block_id for block in group.row[copied.start : copied.stop]]
            slots = group.host_slots[copied.start : copied.stop]
            self._orders.found(FoundOrder(trunk.name, index, uids, slots, ids))

    def num_to_fit(self, kv: RequestKV) -> int:
        """Return how many blocks a parked request takes that finds much in the pool only.

        0 if it does not. As in vLLM it begins with that only when there is room for all of it.
        """
        columns = self._columns_of(kv)
        num_shared = self.num_shared(columns)
        if len(columns) <= max(num_shared, num_complete(columns)):
            return 0
        return self._num_whole(kv.keys) - num_shared * self._num_groups

    def _num_whole(self, keys: Sequence[BlockHash]) -> int:
        """Return how many blocks a request takes that has all layers in the pool."""
        return (len(keys) + 1) * self._num_groups

    def _begin_as_cached(self, kv: RequestKV) -> None:
        """Let a request that is on the host only have the cache's columns in place of its own."""
        old, new = kv.columns, self._columns_of(kv)
        if new == old:
            return
        self._host.cache.share(new)
        self._host.release(old)
        in_pool_only = [column for column in new if column.is_left and not column.slots]
        self._give_room(in_pool_only)
        kv.columns = new
        for index, group in enumerate(kv.groups):
            self._host.give_back(group.host_slots[len(old) : len(new)])
            group.host_slots[: len(new)] = [column.slot(index) for column in new]
            num_blocks = len(group.host_slots)
            group.row = [self._blocks.null] * num_blocks
            group.num_saves_sent = group.num_host_blocks = num_blocks
            kv.num_tokens = num_blocks * self._block_size
        self._orders.begin_with(kv)

    def _give_room(self, columns: Sequence[Column]) -> None:
        """Give columns that are in the pool only slots, if the host has as many."""
        num_groups = self._num_groups
        slots = self._host.take(SlotPromise(), len(columns) * num_groups)
        if slots is not None:
            for number, column in enumerate(columns):
                column.slots = tuple(slots[number * num_groups :][:num_groups])

    def _columns_of(self, kv: RequestKV) -> list[Column]:
        """Return what a request on the host begins with when it comes back.

        Where the cache has other columns of its tokens, or more than it has, it has those.
        """
        prefix = kv.record.prefix
        found = self.find(prefix, kv.keys, prefix.num_keys)
        if len(found) <= len(kv.columns):
            found = found[: prefix.num_complete]
        return [*found, *kv.columns[len(found) :]]

    def find(
        self, prefix: FoundPrefix, keys: Sequence[BlockHash], num_keys: int
    ) -> Sequence[Column]:
        """Return the columns that a request may begin with: on the host, shared, or left behind.

        What is left behind of a request that fits the pool, if that is enough more than the host
        has. `prefix`: the request's own.
        """
        columns = self._host.find(prefix, keys, num_keys)
        if prefix.num_complete >= len(columns):
            return columns
        num_shared = self.num_shared(columns)
        num_else = max(prefix.num_complete, num_shared)
        end = _end_left(columns, num_shared)
        is_worth_it = self.is_on and end - num_else >= self.num_least
        if is_worth_it and self._num_whole(keys) <= self._blocks.num_usable:
            return columns[:end]
        return columns[:num_else]

    def num_to_share(self, kv: RequestKV) -> int:
        """Return how many leading blocks of a request in the queue are, or will be, trunks'."""
        return self.num_shared(self._columns_of(kv)) if kv.is_parked and kv.keys else kv.num_shared

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
                blocks.extend(self._end(trunk, is_right=bool(kv.keys)))
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

    def _end(self, trunk: Trunk, *, is_right: bool) -> list[KVCacheBlock]:
        """End a trunk. `is_right`: as its last user, of which nothing was lost."""
        give_up(trunk)
        if trunk.is_found:
            end = trunk.end if is_right else trunk.num_copied_blocks
            leave_found(self._blocks, trunk, range(trunk.first, end))
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
        may_share = self.is_on and bool(kv.keys)
        if kv.is_parked:
            return self.found(self._columns_of(kv)) if may_share else []
        return stretches(kv, len(kv.keys) if may_share else 0)

    def _split(self, holder: Holder, end: int) -> Trunk:
        """Make what a holder has before `end` a trunk of its users'."""
        trunk = self.splits.split(holder, end)
        self.all[trunk] = None
        self._counters.num_trunk_splits += 1
        return trunk

    # -- integrity ----------------------------------------------------------------------------

    def check_integrity(self, kvs: Collection[RequestKV]) -> None:
        """Assert that each user has its trunks one behind the other, and they are what it has."""
        num_uses = 0
        num_holders = Counter(c for one in (*kvs, *self.all) for c in own_columns(one))
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
            columns, last = own_columns(trunk), self.num_least - 1
            is_short = len(columns) <= last  # as what a split leaves may be
            is_found = is_short or columns[last].holder is trunk
            assert is_found or num_holders[columns[last]] > 1, "a trunk is not found"


def _end_left(columns: Sequence[Column], first: int) -> int:
    """Return up to where free blocks hold columns from the `first` on."""
    left = takewhile(lambda one: one.is_left, islice(columns, first, None))
    return first + sum(1 for _ in left)


def leave_found(blocks: PoolBlocks, holder: Holder, positions: range) -> None:
    """End the life of a holder's blocks at these positions; others may find their KV in them."""
    held = [group.hand_over(positions) for group in holder.groups]
    columns = holder.columns[positions.start : positions.stop]
    left = list(zip(columns, zip(*held, strict=True), strict=True))
    blocks.leave(reversed(left))  # the last ones are taken first
