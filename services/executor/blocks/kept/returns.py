"""Brings what a turn begins with that waits for its tool back to the pool, ahead of its time.

Where answers end with tool calls, the next turn is known to come (`retaining.py`). What of its
columns is on the host only is copied while no request waits, while the link carries nothing else,
and into blocks that hold nothing which is kept for others. No request has it then: blocks are
*left*, as those of a request that ends (`pool_blocks.py`): whoever begins with the columns finds
them there.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.control.prefixes.prefix_cache import Column
from services.executor.blocks.host_pool import HostPool
from services.executor.blocks.pool_blocks import leave_known
from services.executor.blocks.restores import Restores

NAMES = tuple(f"\0returns-{number}" for number in range(4))  # in orders to the ranks, in turn
MAX_TURNS = 256  # that are known, the newest
MAX_BLOCKS = 512  # that are under way at once, or moved: others may want them
MAX_LOOKED_AT = 1024  # columns, in a step


@dataclass(slots=True, eq=False)
class AwaitedTurn:
    """What a session's next turn begins with."""

    keys: Sequence[Hashable]  # of columns
    num_left: int  # leading ones that were not looked at


@dataclass(slots=True, eq=False)
class Returning:
    """Columns on their way to the pool: they have a user more, and their blocks are in no row."""

    turn: AwaitedTurn
    end: int  # where the turn goes on if it is given up
    columns: Sequence[Column]
    blocks: list[list[KVCacheBlock]] = field(default_factory=list)  # by layer group, and column
    under_way: dict[int, list[KVCacheBlock]] = field(default_factory=dict)  # by restore id

    @property
    def owned(self) -> list[KVCacheBlock]:
        return [*chain.from_iterable(self.blocks)]


class Returns:
    """Copies columns into free blocks, and leaves them there: of each turn the last ones first.

    So the first ones are the last to be taken by others, in the pool and on the host.

    returns.await_turn("session", keys)
    returns.look_again()  # blocks have come free
    returns.advance(is_wanted=False, link_is_idle=lambda: True)  # before each step
    returns.arrive(done)  # orders that every rank has carried out
    """

    def __init__(self, restores: Restores, host: HostPool, num_groups: int) -> None:
        self._restores, self._host, self._num_groups = restores, host, num_groups
        self._blocks, self._cache = restores.blocks, host.cache
        self._turns: OrderedDict[Hashable, AwaitedTurn] = OrderedDict()  # by session
        self._todo: deque[AwaitedTurn] = deque()
        self._returning: Returning | None = None
        self._number = 0  # of those that have begun
        self._is_wanted = False
        self._num_moved = 0  # blocks, since `look_again`

    @property
    def is_busy(self) -> bool:
        """Whether something is brought back, or may be."""
        return self._returning is not None or bool(self._todo and not self._is_wanted)

    @property
    def num_owned(self) -> int:
        """Return how many blocks of the pool it has."""
        return 0 if self._returning is None else len(self._returning.owned)

    @property
    def num_coming(self) -> int:
        """Return how many blocks are on their way."""
        one = self._returning
        return 0 if one is None else sum(map(len, one.under_way.values()))

    def await_turn(self, session: Hashable, keys: Sequence[Hashable]) -> None:
        """Bring back what a session's next turn begins with, while it is kept for a tool.

        Not where windows and states have to be there, too: those come with the request.
        """
        if self._cache.needs_anchors or not keys:
            return
        before = self._turns.pop(session, None)
        if before is not None and before in self._todo:
            self._todo.remove(before)
        self._turns[session] = turn = AwaitedTurn(keys, len(keys))
        if len(self._turns) > MAX_TURNS:
            self._turns.popitem(last=False)
        self._todo.append(turn)

    def look_again(self) -> None:
        """Take in that the pool has changed: what had no room may have some, what was there may be
        gone.
        """
        for session in [s for s, turn in self._turns.items() if not self._is_awaited(turn)]:
            del self._turns[session]
        for turn in self._turns.values():
            turn.num_left = len(turn.keys)
        self._todo, self._num_moved = deque(self._turns.values()), 0

    def _is_awaited(self, turn: AwaitedTurn) -> bool:
        return turn.keys[-1] in self._cache.awaited

    # -- each step ----------------------------------------------------------------------------

    def advance(self, *, is_wanted: bool, link_is_idle: Callable[[], bool]) -> None:
        """Begin with the next columns; `is_wanted`: requests wait, or the engine is to rest."""
        self._is_wanted = is_wanted
        if is_wanted or self.num_owned > self._blocks.num_free:
            self.stop()
        elif self._todo and self._returning is None and link_is_idle():
            self._begin_next()

    def _begin_next(self) -> None:
        turn = self._todo[0]
        end = turn.num_left
        columns = self._lacking(turn)
        if columns and self._has_room(len(columns) * self._num_groups):
            self._begin(Returning(turn, end, columns))
        elif columns:
            turn.num_left = end
            if self._num_moved > self._blocks.num_left:  # all that is left is kept
                self._todo.clear()  # until blocks have come free
        elif not turn.num_left:
            self._todo.popleft()

    def _lacking(self, turn: AwaitedTurn) -> list[Column]:
        """Return the next columns of a turn that are on the host and not in the pool.

        At least half of the free blocks are for growth.
        """
        if not self._is_awaited(turn):
            turn.num_left = 0
        most = min(MAX_BLOCKS, self._blocks.num_free // 2) // self._num_groups
        columns = list[Column]()
        last = max(0, turn.num_left - MAX_LOOKED_AT)
        while turn.num_left > last and len(columns) < max(1, most):
            turn.num_left -= 1
            column = self._cache.get(turn.keys[turn.num_left])
            if column is None or not column.is_complete:
                continue
            if not column.is_in_pool and not column.num_users:
                columns.append(column)
        return columns[::-1]

    def _has_room(self, num_blocks: int) -> bool:
        """Return whether blocks can be taken, and nothing be lost that is kept.

        The columns' slots are not free on the host meanwhile: none of them may be promised. What
        is kept, and would be taken first, is left anew.
        """
        self._num_moved += 1  # there is an end, too, where nothing can be moved
        if num_blocks > self._host.num_unpromised or 2 * num_blocks > self._blocks.num_free:
            self._todo.clear()
            return False
        kept: list[Column] = []
        num_lacking = num_blocks - (self._blocks.num_free - self._blocks.num_left)
        for column, num_left in self._blocks.oldest():
            if num_lacking <= 0 or len(kept) * self._num_groups >= MAX_BLOCKS:
                break
            if column is None or not self._cache.is_kept(column.key):
                num_lacking -= num_left
            elif column.is_complete:
                kept.append(column)
            else:  # it is nowhere else
                self._todo.clear()
                return False
        self._blocks.leave_anew(kept)
        self._num_moved += len(kept) * self._num_groups
        return num_lacking <= 0

    def _begin(self, one: Returning) -> None:
        self._number += 1
        name = self._name
        self._restores.orders.drop_request(name)  # an earlier one's
        self._cache.share(one.columns)
        self._returning = one
        uids = [column.uid for column in one.columns]
        found = [self._blocks.find(uids, group) for group in range(self._num_groups)]
        for group, here in enumerate(found):  # all are found before one is loaded
            slots = [column.slots[group] for column in one.columns]
            ordered, blocks = self._restores.order_lacking(name, group, here, uids, slots)
            one.under_way.update(ordered)
            one.blocks.append(blocks)
        self._host.counters.num_returned_blocks += self.num_coming
        if not one.under_way:
            self._leave(one)

    @property
    def _name(self) -> str:
        """Return the newest one's name. Ranks know it for a while: what is wrong shows late."""
        return NAMES[self._number % len(NAMES)]

    def arrive(self, done: Collection[int]) -> None:
        """Leave what every rank has copied."""
        one = self._returning
        if one is None:
            return
        for restore_id in one.under_way.keys() & done:
            del one.under_way[restore_id]
        if not one.under_way:
            self._leave(one)

    def _leave(self, one: Returning) -> None:
        leave_known(self._blocks, self._cache, one.columns, one.blocks)
        self._end(one)

    def _end(self, one: Returning) -> None:
        self._host.release(one.columns)
        self._returning = None

    # -- what is given up ---------------------------------------------------------------------

    def stop(self) -> None:
        """Give back what is on its way; it is begun anew when blocks have come free."""
        one = self._returning
        if one is not None:
            self._restores.let_go(one.owned, one.under_way)
            one.turn.num_left = one.end
            self._end(one)

    def fail(self, restore_id: int) -> bool:
        """Take in that a copy went wrong; False if it is none of these."""
        if self._returning is None or restore_id not in self._returning.under_way:
            return False
        self.stop()
        self._todo.clear()
        return True

    def lose(self, names: Collection[str]) -> bool:
        """Take in that what was brought back is corrupt; False if it is not among these names."""
        return not set(NAMES).isdisjoint(names)

    def forget_all(self) -> None:
        """Bring back nothing of what has ended until now."""
        self.stop()
        self._turns.clear()
        self._todo.clear()

    def check_integrity(self) -> tuple[list[KVCacheBlock], Sequence[Column]]:
        """Return the blocks and the columns that it has."""
        one = self._returning
        if one is None:
            return [], ()
        owned = {block.block_id for block in one.owned}
        under_way = [b.block_id for blocks in one.under_way.values() for b in blocks]
        assert len(owned) == len(one.columns) * self._num_groups
        assert under_way, "all is there, and was not left"
        assert owned.issuperset(under_way)
        return one.owned, one.columns
