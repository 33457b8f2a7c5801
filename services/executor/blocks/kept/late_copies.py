"""Copies to the host what is kept for a later request and had no copy when its request ended.

Write-through follows requests while they live. What it has not copied by then is in the pool only,
in free blocks that still hold it. Of columns that are kept (`retaining.py`) copies are made behind
the request's end, while no request waits and as far as write-through leaves the link: their blocks
are taken meanwhile, and *left* again (`pool_blocks.py`).
"""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.control.prefixes.prefix_cache import Column
from services.executor.blocks.host_pool import HostPool
from services.executor.blocks.pool_blocks import PoolBlocks, leave_known
from services.executor.blocks.step_orders import StepOrders
from services.executor.step_messages import SaveOrder

NAMES = tuple(f"\0late-copies-{number}" for number in range(4))  # in orders to the ranks, in turn
MAX_KEPT = 256  # beginnings that are known; others are not copied
MAX_BLOCKS = 512  # that are under way at once: others may want them
MAX_LOOKED_AT = 1024  # columns, in a step


@dataclass(slots=True, eq=False)
class KeptBeginning:
    """What a request has left that is kept."""

    keys: Sequence[Hashable]  # of columns
    num_done: int  # leading ones that need no look


@dataclass(slots=True, eq=False)
class Batch:
    """Columns on their way to the host: they have a user more, and their blocks are in no row."""

    kept: KeptBeginning
    first: int  # where that goes on if the batch is given up
    columns: Sequence[Column]
    slots: Sequence[Sequence[int]]  # by column, and layer group
    blocks: Sequence[Sequence[KVCacheBlock]]  # by layer group, and column
    step: int = 0  # that copies them; 0: one to come
    is_copied: bool = False

    @property
    def owned(self) -> list[KVCacheBlock]:
        return [*chain.from_iterable(self.blocks)]

    @property
    def own_slots(self) -> list[int]:
        return [*chain.from_iterable(self.slots)]


class LateCopies:
    """Takes columns that are left without a copy, and leaves them with one: the first ones first.

    copies.add(keys, num_copied=3)  # of columns that are kept
    copies.advance(is_wanted=False, budget=lambda: 100)  # before each step
    saves = copies.plan(step)
    copies.confirm(saved_step)
    """

    def __init__(
        self, blocks: PoolBlocks, orders: StepOrders, host: HostPool, num_groups: int
    ) -> None:
        self._blocks, self._orders, self._host = blocks, orders, host
        self._cache, self._num_groups = host.cache, num_groups
        self._todo = deque[KeptBeginning]()
        self._batch: Batch | None = None
        self._number = 0  # of batches that have begun
        self._is_wanted = False

    @property
    def is_busy(self) -> bool:
        """Whether something is copied, or may be."""
        return self._batch is not None or bool(self._todo and not self._is_wanted)

    @property
    def num_owned(self) -> int:
        """Return how many blocks of the pool it has."""
        return 0 if self._batch is None else len(self._batch.owned)

    def add(self, keys: Sequence[Hashable], *, num_copied: int) -> None:
        """Copy what lacks a copy of columns that are kept, once no request has them.

        `num_copied`: leading ones that have one. Not where windows and states have to be there,
        too: requests stay until those are copied.
        """
        is_lacking = num_copied < len(keys) and not self._cache.needs_anchors
        if is_lacking and len(self._todo) < MAX_KEPT:
            self._todo.append(KeptBeginning(keys, num_copied))

    # -- each step ----------------------------------------------------------------------------

    def advance(self, *, is_wanted: bool, budget: Callable[[], int]) -> None:
        """Begin with the next columns; `is_wanted`: requests wait, or the engine is to rest.

        `budget` returns how many blocks a step may order; one column at least, unless it is 0.
        """
        self._is_wanted = is_wanted
        if self._batch is not None and self._batch.is_copied:
            self._take_in(self._batch)
        if is_wanted or self.num_owned > self._blocks.num_free:
            self.stop()
        elif self._todo and self._batch is None and (max_blocks := budget()) > 0:
            self._begin_next(min(max_blocks, MAX_BLOCKS))

    def _begin_next(self, max_blocks: int) -> None:
        kept, num_room = self._todo[0], self._blocks.num_free // 2 // self._num_groups
        first = kept.num_done
        columns = self._lacking(kept, min(num_room, max(1, max_blocks // self._num_groups)))
        if not columns:
            if kept.num_done == len(kept.keys) or not num_room:
                self._todo.popleft()
            return
        slots = self._host.take_spare(len(columns) * self._num_groups)
        if slots is None:  # the host has no room
            self._todo.popleft()
            return
        self._number += 1
        self._orders.drop_request(self._name)  # an earlier batch's
        self._cache.share(columns)  # before their blocks are taken: they are nowhere else
        uids = [column.uid for column in columns]
        self._batch = Batch(
            kept,
            first,
            columns,
            slots=[[slots.pop() for _ in range(self._num_groups)] for _ in columns],
            blocks=[self._blocks.find_all(uids, group) for group in range(self._num_groups)],
        )

    def _lacking(self, kept: KeptBeginning, max_columns: int) -> list[Column]:
        """Return the next columns that are in free blocks and not on the host, and are kept yet."""
        columns = list[Column]()
        end = min(len(kept.keys), kept.num_done + MAX_LOOKED_AT)
        while kept.num_done < end and len(columns) < max_columns:
            column = self._cache.get(kept.keys[kept.num_done])
            kept.num_done += 1
            if column is None or column.num_users or column.is_complete or not column.is_left:
                continue
            if self._cache.is_kept(column.key):
                columns.append(column)
        return columns

    @property
    def _name(self) -> str:
        """Return the newest batch's name. Ranks know it for a while: what is wrong shows late."""
        return NAMES[self._number % len(NAMES)]

    def plan(self, step: int) -> list[SaveOrder]:
        """Return the copies that begin with a step."""
        batch = self._batch
        if batch is None or batch.step:
            return []
        batch.step = step
        uids = [column.uid for column in batch.columns]
        return [
            SaveOrder(
                self._name,
                group,
                uids,
                [slots[group] for slots in batch.slots],
                [block.block_id for block in blocks],
                from_staging=False,
            )
            for group, blocks in enumerate(batch.blocks)
        ]

    def confirm(self, saved_step: int) -> None:
        """Count the copies of all steps up to `saved_step` as complete."""
        if self._batch is not None and 0 < self._batch.step <= saved_step:
            self._batch.is_copied = True

    def _take_in(self, batch: Batch) -> None:
        for column, slots in zip(batch.columns, batch.slots, strict=True):
            column.slots, column.is_complete = tuple(slots), True
        self._host.counters.num_late_blocks += len(batch.owned)
        self._leave(batch)

    def _leave(self, batch: Batch) -> None:
        """Let whoever begins with the columns find their blocks, unless they are forgotten."""
        leave_known(self._blocks, self._cache, batch.columns, batch.blocks)
        self._host.release(batch.columns)
        self._batch = None

    # -- what is given up ---------------------------------------------------------------------

    def stop(self) -> None:
        """Leave what is on its way as it was; it is begun anew when there is time."""
        batch = self._batch
        if batch is None:
            return
        if batch.is_copied:
            self._take_in(batch)
            return
        self._orders.drop_request(self._name)
        self._host.give_back(batch.own_slots)
        batch.kept.num_done = batch.first
        self._leave(batch)

    def fail(self, saves: Collection[tuple[int, str, int]]) -> None:
        """Give up what saves were part of that did not succeed, by step, name and group."""
        batch = self._batch
        if batch is not None and any(
            (step, name) == (batch.step, self._name) for step, name, _ in saves
        ):
            self.stop()
            self._todo.popleft()

    def forget_all(self) -> None:
        """Copy nothing of what has ended until now."""
        self.stop()
        self._todo.clear()

    def check_integrity(self) -> tuple[list[KVCacheBlock], Sequence[Column], list[int]]:
        """Return the blocks, the columns and the slots that it has."""
        batch = self._batch
        if batch is None:
            return [], (), []
        assert batch.kept is self._todo[0]
        assert not any(column.is_left or column.is_complete for column in batch.columns)
        assert len(batch.owned) == len(batch.own_slots) == len(batch.columns) * self._num_groups
        return batch.owned, batch.columns, batch.own_slots
