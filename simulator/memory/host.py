"""The host pool: slots promised to requests, and the columns of the prefix cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.control.counters import Counters
from services.control.prefix_cache import Column, PrefixCache
from services.placement.types import RequestId
from simulator.memory.blocks import BlockLedger

COLUMNS = RequestId("")  # who owns the slots of all columns


@dataclass(slots=True, kw_only=True)
class HostLedger(BlockLedger):
    """Slots by owner. What nobody uses of the prefix cache is as good as free."""

    counters: Counters = field(default_factory=Counters)
    cache: PrefixCache = field(init=False)

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

    def publish(self, owner: RequestId, column: Column) -> None:
        """Make a column of slots that `owner` was promised."""
        num_slots = len(column.slots)
        self.owned[owner] -= num_slots
        self.owned[COLUMNS] = self.owned.get(COLUMNS, 0) + num_slots
        self.cache.publish(column)

    def give_back(self, columns: Sequence[Column]) -> None:
        """Take columns back that a request does not use any more; they may be found again."""
        self._lose(self.cache.release(columns))

    def _lose(self, slots: Sequence[int]) -> None:
        self.owned[COLUMNS] = self.owned.get(COLUMNS, 0) - len(slots)
        self.num_free += len(slots)
