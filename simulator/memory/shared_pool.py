"""A pool whose blocks several requests use: vLLM's prefix cache, where no KV leaves the pool.

All layer groups of a position are taken, shared and freed together. A position that is full is
found by its key from the moment on at which the step that fills it is scheduled. What is in no use
any more is free, and found until its room is wanted: what has no key goes first, then what was left
longest ago, a request's last positions before its first.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from services.placement.types import RequestId
from simulator.memory.pool import PoolLedger


@dataclass(slots=True, eq=False)
class Position:
    """One block in every layer group."""

    key: Hashable = None  # None: not full, or not to be found
    num_users: int = 0


@dataclass(slots=True, kw_only=True)
class SharedPool(PoolLedger):
    """`owned` says what a request uses, the blocks that others use too included."""

    num_groups: int
    _rows: dict[RequestId, list[Position]] = field(default_factory=dict)
    _free: OrderedDict[Position, None] = field(default_factory=OrderedDict)  # as they go
    _by_key: dict[Hashable, list[Position]] = field(default_factory=dict)  # the oldest first
    _sides: dict[RequestId, int] = field(default_factory=dict)  # blocks of side groups
    _num_lent: int = 0  # positions whose blocks side groups have

    def __post_init__(self) -> None:
        PoolLedger.__post_init__(self)
        self._free.update((Position(), None) for _ in range(self.num_blocks // self.num_groups))

    def set_owned(self, owner: RequestId, num_blocks: int, *, num_side: int = 0) -> bool:
        row = self._rows.get(owner, [])
        num_more = (num_blocks - num_side) // self.num_groups - len(row)
        assert num_more >= 0, "a row gets shorter only by its request's leaving"
        num_sides = sum(self._sides.values()) - self._sides.get(owner, 0) + num_side
        num_to_lend = -(-num_sides // self.num_groups) - self._num_lent
        if num_more + num_to_lend > len(self._free):
            return False
        self._set_side(owner, num_side)
        self._rows[owner] = row
        row.extend(self._take() for _ in range(num_more))
        self._count(owner)
        return True

    def _take(self) -> Position:
        position, _ = self._free.popitem(last=False)
        self._forget(position)
        position.num_users = 1
        return position

    def _set_side(self, owner: RequestId, num_side: int) -> None:
        """Let an owner have so many blocks of side groups: the blocks of free positions."""
        if num_side == self._sides.get(owner, 0):
            return
        self._sides[owner] = num_side
        num_lent = -(-sum(self._sides.values()) // self.num_groups)
        while self._num_lent < num_lent:
            self._forget(self._free.popitem(last=False)[0])
            self._num_lent += 1
        while self._num_lent > num_lent:
            position = Position()
            self._free[position] = None
            self._free.move_to_end(position, last=False)
            self._num_lent -= 1

    def _forget(self, position: Position) -> None:
        if position.key is None:
            return
        alike = self._by_key[position.key]
        alike.remove(position)
        if not alike:
            del self._by_key[position.key]
        position.key = None

    def _count(self, owner: RequestId) -> None:
        num_side = self._sides.get(owner, 0)
        self.owned[owner] = self.num_groups * len(self._rows[owner]) + num_side
        self._count_free()

    def _count_free(self) -> None:
        """What side groups leave of positions is not free: rows take whole ones."""
        self.num_free = self.num_groups * len(self._free)

    def release(self, owner: RequestId) -> None:
        nameless = []
        for position in reversed(self._rows.pop(owner, [])):
            position.num_users -= 1
            if position.num_users:
                continue
            self._free[position] = None
            if position.key is None:
                nameless.append(position)
        for position in reversed(nameless):
            self._free.move_to_end(position, last=False)
        self.owned.pop(owner, None)
        self._set_side(owner, 0)
        self._sides.pop(owner, None)
        self._count_free()

    # -- the prefix cache ----------------------------------------------------------------------

    def cached(self, keys: Iterable[Hashable]) -> list[Position]:
        """Return where the KV of leading keys is, up to the first that is nowhere."""
        found = []
        for key in keys:
            if key not in self._by_key:
                break
            found.append(self._by_key[key][0])
        return found

    def num_free_of(self, positions: Sequence[Position]) -> int:
        """Return the blocks of these that are free."""
        return self.num_groups * sum(not position.num_users for position in positions)

    def begin_with(self, owner: RequestId, positions: Sequence[Position]) -> None:
        """Let a request without blocks use what `cached` has found."""
        for position in positions:
            if not position.num_users:
                del self._free[position]
            position.num_users += 1
        self._rows[owner] = list(positions)
        self._count(owner)

    def publish(self, owner: RequestId, first: int, keys: Sequence[Hashable]) -> None:
        """Let full positions of a request be found, from position `first` on."""
        row = self._rows[owner][first : first + len(keys)]
        for position, key in zip(row, keys, strict=True):
            if position.key is None:
                position.key = key
                self._by_key.setdefault(key, []).append(position)

    def check_integrity(self) -> None:
        """Raise AssertionError if positions were lost or made, or others are found than filled."""
        used = {position for row in self._rows.values() for position in row}
        assert used.isdisjoint(self._free)
        assert self.num_groups * (len(used) + len(self._free) + self._num_lent) == self.num_blocks
        assert 0 <= self.num_groups * self._num_lent - sum(self._sides.values()) < self.num_groups
        assert self.num_free == self.num_groups * len(self._free)
        for position in used:
            users = sum(row.count(position) for row in self._rows.values())
            assert position.num_users == users
        assert not any(position.num_users for position in self._free)
        found = [position for alike in self._by_key.values() for position in alike]
        named = [position for position in (*used, *self._free) if position.key is not None]
        assert len(found) == len(named)
        assert set(found) == set(named)
        assert self.owned == {
            owner: self.num_groups * len(row) + self._sides.get(owner, 0)
            for owner, row in self._rows.items()
        }
