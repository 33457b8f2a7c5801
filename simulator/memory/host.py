"""The host pool: slots promised to requests, and the columns of the prefix cache."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from services.control.counters import Counters
from services.control.prefixes.prefix_cache import Column, PrefixCache
from services.placement.types import RequestId
from simulator.memory.blocks import BlockLedger

COLUMNS = RequestId("")  # owner of the slots of all columns


@dataclass(slots=True, kw_only=True)
class HostLedger(BlockLedger):
    """Slots by owner. What no request uses of the prefix cache is as good as free.

    A column is made when a step fills its block, and is in the cache from when it is copied.
    """

    counters: Counters = field(default_factory=Counters)
    cache: PrefixCache = field(init=False)
    _filled: dict[Hashable, Column] = field(default_factory=dict)  # not copied yet, by key

    def __post_init__(self) -> None:
        BlockLedger.__post_init__(self)
        self.cache = PrefixCache(self.counters)

    @property
    def num_unpromised(self) -> int:
        """Slots that may be promised to requests."""
        return self.num_free + self.cache.num_idle_slots

    def set_owned(self, owner: RequestId, num_blocks: int) -> bool:
        num_lacking = num_blocks - self.owned.get(owner, 0) - self.num_free
        if num_lacking > self.cache.num_idle_slots:
            return False
        if num_lacking > 0:
            self._lose(self.cache.evict(num_lacking))
        return BlockLedger.set_owned(self, owner, num_blocks)

    def fill(self, owner: RequestId, column: Column) -> None:
        """Make a column of slots that `owner` was promised; its copy is still to come."""
        num_slots = len(column.slots)
        self.owned[owner] -= num_slots
        self.owned[COLUMNS] = self.owned.get(COLUMNS, 0) + num_slots
        self._filled.setdefault(column.key, column)

    def publish(self, columns: Iterable[Column]) -> None:
        """Let columns be found: their copies are complete."""
        for column in columns:
            self._forget_filled(column)
            self.cache.publish(column)

    def filled(self, keys: Iterable[Hashable]) -> Iterator[Column]:
        """Yield the columns of leading keys that are not copied yet, and all in the pool."""
        for key in keys:
            column = self._filled.get(key)
            if column is None or column.holder is None or column.holder.offloaded:
                return
            yield column

    def give_back(self, columns: Sequence[Column]) -> None:
        """Take columns back that a request does not use any more; they may be found again."""
        self._lose(self.cache.release(columns))
        for column in columns:
            if not column.num_users:
                self._forget_filled(column)

    def _forget_filled(self, column: Column) -> None:
        if self._filled.get(column.key) is column:
            del self._filled[column.key]

    def _lose(self, slots: Sequence[int]) -> None:
        self.owned[COLUMNS] = self.owned.get(COLUMNS, 0) - len(slots)
        self.num_free += len(slots)
