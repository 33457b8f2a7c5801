"""Brings what a turn begins with that waits for its tool back to the pool, ahead of its time.

Where answers end with tool calls, the next turn is known to come (`retaining.py`). What of its
columns is on the host only is copied while no request waits, while the link carries nothing else,
and into blocks that hold nothing which is kept for others. No request has it then: blocks are
*left*, as those of a request that ends (`pool_blocks.py`): whoever begins with the columns finds
them there.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.control.prefixes.prefix_cache import Column
from services.executor.blocks.host_pool import HostPool
from services.executor.blocks.restores import Restores

NAME = "\0returns"  # in orders to the ranks: no request is called so
MAX_TURNS = 256  # that are known, the newest
MAX_BLOCKS = 512  # that are under way at once: others may want them


@dataclass(slots=True)
class AwaitedTurn:
    """What the next turn begins with."""

    keys: Sequence[Hashable]  # of columns
    position: int = 0  # of the first one that may not be in the pool


@dataclass(slots=True, eq=False)
class Returning:
    """Columns on their way to the pool: they have a user more, and their blocks are in no row."""

    columns: Sequence[Column]
    blocks: list[list[KVCacheBlock]]  # by layer group, a block for each column
    under_way: dict[int, list[KVCacheBlock]] = field(default_factory=dict)  # by restore id

    @property
    def owned(self) -> list[KVCacheBlock]:
        return [*chain.from_iterable(self.blocks)]


class Returns:
    """Copies columns into free blocks, and leaves them there.

    returns.await_turn("r1", keys)
    returns.look_again()  # blocks have come free
    returns.advance(is_wanted=False, link_is_idle=lambda: True)  # before each step
    returns.arrive(done)  # orders that every rank has carried out
    """

    def __init__(self, restores: Restores, host: HostPool, num_groups: int) -> None:
        self._restores, self._host, self._num_groups = restores, host, num_groups
        self._blocks, self._cache = restores.blocks, host.cache
        self._turns: OrderedDict[str, AwaitedTurn] = OrderedDict()  # by the request that ended
        self._todo: deque[AwaitedTurn] = deque()
        self._returning: Returning | None = None

    @property
    def is_busy(self) -> bool:
        """Whether something is, or may be, brought back."""
        return bool(self._returning or self._todo)

    @property
    def num_owned(self) -> int:
        """Return how many blocks of the pool it has."""
        return 0 if self._returning is None else len(self._returning.owned)

    @property
    def num_coming(self) -> int:
        """Return how many blocks are on their way."""
        one = self._returning
        return 0 if one is None else sum(map(len, one.under_way.values()))

    def await_turn(self, request_id: str, keys: Sequence[Hashable]) -> None:
        """Bring back what a request leaves that has ended with tool calls, while it is kept."""
        self._turns[request_id] = turn = AwaitedTurn(keys)
        if len(self._turns) > MAX_TURNS:
            self._turns.popitem(last=False)
        self._todo.append(turn)

    def look_again(self) -> None:
        """Take in that the pool has changed: what had no room may have some, what was there may be
        gone.
        """
        for name in [n for n, turn in self._turns.items() if not self._is_awaited(turn)]:
            del self._turns[name]
        for turn in self._turns.values():
            turn.position = 0
        self._todo = deque(self._turns.values())

    def _is_awaited(self, turn: AwaitedTurn) -> bool:
        return bool(turn.keys) and turn.keys[-1] in self._cache.awaited

    # -- each step ----------------------------------------------------------------------------

    def advance(self, *, is_wanted: bool, link_is_idle: Callable[[], bool]) -> None:
        """Begin with the next columns; `is_wanted`: requests wait for blocks, or for the link."""
        if is_wanted or self.num_owned > self._blocks.num_free:
            self.stop()
        elif self._todo and self._returning is None and link_is_idle():
            self._begin_next()

    def _begin_next(self) -> None:
        while self._todo:
            columns = self._lacking(self._todo[0])
            if not columns:
                self._todo.popleft()
            elif self._has_room(len(columns) * self._num_groups):
                self._begin(columns)
                return
            else:
                self._todo.clear()  # until blocks have come free

    def _lacking(self, turn: AwaitedTurn) -> list[Column]:
        """Return the next columns of a turn that are on the host and not in the pool."""
        if not self._is_awaited(turn):
            return []
        most = max(1, MAX_BLOCKS // self._num_groups)
        columns: list[Column] = []
        while turn.position < len(turn.keys) and len(columns) < most:
            column = self._cache.get(turn.keys[turn.position])
            if column is None or not column.is_complete:
                break
            turn.position += 1
            if not column.is_in_pool and not column.num_users:
                columns.append(column)
        return columns

    def _has_room(self, num_blocks: int) -> bool:
        """Return whether blocks can be taken: half of the free ones are for growth.

        The columns' slots are not free on the host meanwhile: none of them may be promised.
        """
        if num_blocks > self._host.num_unpromised:
            return False
        books = (self._cache.retention, self._cache.awaited)
        return 2 * num_blocks <= self._blocks.num_free and self._blocks.make_way(
            num_blocks, lambda key: any(key in book for book in books)
        )

    def _begin(self, columns: Sequence[Column]) -> None:
        self._cache.share(columns)
        self._returning = one = Returning(columns, [])
        uids = [column.uid for column in columns]
        found = [self._blocks.find(uids, group) for group in range(self._num_groups)]
        for group, blocks in enumerate(found):  # all are found before one is loaded
            lacking = [c for c, block in zip(columns, blocks, strict=True) if block is None]
            loaded: list[KVCacheBlock] = []
            if lacking:
                slots = [column.slots[group] for column in lacking]
                restore_id, loaded = self._restores.order(
                    NAME, group, [column.uid for column in lacking], slots
                )
                one.under_way[restore_id] = loaded
                self._host.counters.num_returned_blocks += len(loaded)
            rest = iter(loaded)
            one.blocks.append([next(rest) if block is None else block for block in blocks])
        if not one.under_way:
            self._leave(one)

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
        positions = list(zip(one.columns, zip(*one.blocks, strict=True), strict=True))
        known = [pair for pair in positions if self._cache.get(pair[0].key) is pair[0]]
        gone = [pair for pair in positions if self._cache.get(pair[0].key) is not pair[0]]
        self._blocks.leave(reversed(known))  # the last ones are taken first
        self._blocks.release([block for _, blocks in gone for block in blocks])
        self._end(one)

    def _end(self, one: Returning) -> None:
        self._host.release(one.columns)
        self._restores.orders.drop_request(NAME)
        self._returning = None

    # -- what is given up ---------------------------------------------------------------------

    def stop(self) -> None:
        """Give back what is on its way; it is begun anew when blocks have come free."""
        one = self._returning
        if one is not None:
            self._restores.let_go(one.owned, one.under_way)
            self._end(one)

    def fail(self, restore_id: int) -> bool:
        """Take in that a copy went wrong; False if it is none of these."""
        if self._returning is None or restore_id not in self._returning.under_way:
            return False
        self.stop()
        self._todo.clear()
        return True

    def lose(self, names: Iterable[str]) -> bool:
        """Take in that what was brought back is corrupt; False if it is not among these names."""
        if NAME not in names:
            return False
        self.stop()
        return True

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
