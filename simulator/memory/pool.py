"""The pool: blocks by owner, and what is still in those that are free."""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

from services.placement.types import RequestId
from simulator.memory.blocks import BlockLedger


@dataclass(slots=True, kw_only=True)
class PoolLedger(BlockLedger):
    """What a request left is in free blocks until these are needed, the oldest going first."""

    num_left: int = 0  # free blocks whose KV may be found
    _left: OrderedDict[Hashable, set[int]] = field(default_factory=OrderedDict)  # groups, by key

    def set_owned(self, owner: RequestId, num_blocks: int, *, num_side: int = 0) -> bool:
        """As every ledger's; `num_side`: those of the blocks that are of side groups."""
        taken = BlockLedger.set_owned(self, owner, num_blocks)
        self._forget_the_taken()
        return taken

    def _forget_the_taken(self) -> None:
        while self.num_left > self.num_free:
            self.num_left -= len(self._left.popitem(last=False)[1])

    def leave(self, keys: Sequence[Hashable], groups: Collection[int]) -> None:
        """Remember what a request's blocks hold that have just come free.

        `keys`: of its leading positions; `groups`: those that had blocks of their own.
        """
        for key in reversed(keys) if groups else ():  # the last ones are taken first
            before = self._left.pop(key, set())
            self._left[key] = now = before.union(groups)
            self.num_left += len(now) - len(before)
        self._forget_the_taken()  # what was uncached had fewer blocks

    def find(self, keys: Sequence[Hashable], group: int) -> int:
        """Let a layer group have the blocks that hold its KV, and return how many it does.

        They are still free: the caller takes them.
        """
        num_found = 0
        for key in keys if self.num_left else ():
            groups = self._left.get(key, set())
            if group in groups:
                groups.remove(group)
                num_found += 1
                if not groups:
                    del self._left[key]
        self.num_left -= num_found
        return num_found

    def num_to_find(self, keys: Sequence[Hashable], groups: Collection[int]) -> int:
        """Return how many blocks `find` would, of several layer groups together."""
        if not self.num_left:
            return 0
        wanted = frozenset(groups)
        return sum(len(wanted & self._left.get(key, set())) for key in keys)

    def check_integrity(self) -> None:
        BlockLedger.check_integrity(self)
        assert self.num_left == sum(map(len, self._left.values())) <= self.num_free
