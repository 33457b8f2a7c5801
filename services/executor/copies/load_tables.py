"""What each request's steps load on one rank: sent once when it changes, and kept here.

A rank knows the host slots of a request's blocks from the saves and restores that named them, and
the blocks of its staging buffers. A table is put together from both, and so is what rows show.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from services.executor.step_messages import (
    LoadTableUpdate,
    PrefixSlots,
    RestoreOrder,
    RowEdit,
    SaveOrder,
    StepTransfers,
    position_of,
)


def _numbers() -> "array[int]":
    return array("q")


@dataclass(slots=True, eq=False)
class LoadTable:
    """One offloaded group of one request; pairwise, and packed: they are joined in every step."""

    buffer: int
    uids: "array[int]" = field(default_factory=_numbers)
    slots: "array[int]" = field(default_factory=_numbers)
    block_ids: "array[int]" = field(default_factory=_numbers)


@dataclass(slots=True)
class RequestLoads:
    """What one request's steps load: a table per offloaded group, in layer order."""

    tables: dict[int, LoadTable] = field(default_factory=dict)
    uids: "array[int]" = field(default_factory=_numbers)  # one per position, as below
    slots: "dict[int, array[int]]" = field(default_factory=dict)  # by group
    side_uids: set[int] = field(default_factory=set)  # no step loads them: windows, open blocks
    staging: "list[array[int]]" = field(default_factory=list)  # blocks of each buffer
    chain: list[int] = field(default_factory=list)  # the tables' groups, ascending

    @property
    def num_staging(self) -> int:
        return len(self.staging)

    def buffer_successor(self, group: int) -> int | None:
        """Return the group that uses a group's staging buffer next in the step."""
        position = self.chain.index(group) + self.num_staging
        return self.chain[position] if position < len(self.chain) else None

    def buffer_predecessor(self, group: int) -> int | None:
        position = self.chain.index(group) - self.num_staging
        return self.chain[position] if position >= 0 else None

    def kept(self, num_positions: int) -> "RequestLoads":
        """Return what is left of a request that was parked: the slots of its first positions."""
        return RequestLoads(
            uids=self.uids[:num_positions],
            slots={group: slots[:num_positions] for group, slots in self.slots.items()},
        )

    def begin_with(self, prefix: PrefixSlots) -> None:
        """Take in where the first blocks are that others have saved."""
        self.uids = array("q", prefix.uids)
        self.slots = {group: array("q", slots) for group, slots in enumerate(prefix.slots)}

    def learn(self, order: SaveOrder | RestoreOrder) -> None:
        """Take in which slots are whose."""
        slots = self.slots.setdefault(order.group, array("q"))
        first, last = position_of(order.uids[0]), position_of(order.uids[-1])
        for known, new in ((self.uids, order.uids), (slots, order.slots)):
            known.extend([0] * (last + 1 - len(known)))
            if last - first + 1 == len(new):
                known[first : last + 1] = array("q", new)
            else:
                for uid, number in zip(order.uids, new, strict=True):
                    known[position_of(uid)] = number

    def resize_staging(self, num_staging: int) -> None:
        del self.staging[num_staging:]
        self.staging.extend(array("q") for _ in range(num_staging - len(self.staging)))

    def load(self, group: int, positions: range) -> "array[int]":
        """Extend a group's table by a stretch; return the staging blocks that its row shows."""
        table, stretch = self.tables[group], slice(positions.start, positions.stop)
        block_ids = self.staging[table.buffer][stretch]
        table.uids.extend(self.uids[stretch])
        table.slots.extend(self.slots[group][stretch])
        table.block_ids.extend(block_ids)
        assert len(table.slots) == len(table.block_ids) == len(table.uids)
        return block_ids

    def holds(self, uid: int) -> bool:
        position = position_of(uid)
        if uid in self.side_uids:
            return True
        return position < len(self.uids) and self.uids[position] == uid

    def drop(self, group: int) -> None:
        self.tables.pop(group, None)
        self.chain = sorted(self.tables)


class LoadTables:
    """The tables of all requests."""

    def __init__(self, num_groups: int) -> None:
        """`num_groups`: that steps may load; those behind them come back beside steps only."""
        self._num_groups = num_groups
        self._requests: dict[str, RequestLoads] = {}  # trunks' are among them
        self._users: dict[str, list[str]] = {}  # of trunks
        self._written: list[SaveOrder] = []  # out of staging, by the last step

    def update(self, transfers: StepTransfers) -> tuple[list[str], list[RowEdit]]:
        """Take in a step's changes.

        Return the holders that ended, or ended and begin anew, and how rows of requests change.
        """
        for save in self._written:  # what a step writes to staging is loaded from the next one on
            self._append(save)
        ended = self._drop(transfers)
        for prefix in transfers.prefixes:
            self._of(prefix.request_id).begin_with(prefix)
        orders: list[SaveOrder | RestoreOrder] = [*transfers.saves, *transfers.restores]
        for order in orders:
            loads = self._of(order.request_id)
            if order.group < self._num_groups:
                loads.learn(order)
            else:
                loads.side_uids.update(order.uids)
        for found in transfers.found:
            loads = self._of(found.request_id)
            if not loads.holds(found.uids[-1]):  # of no column, like the others
                loads.side_uids.update(found.uids)
        self._written = [save for save in transfers.saves if save.from_staging]
        for request_id, num_staging in transfers.num_staging.items():
            self._of(request_id).resize_staging(num_staging)
        for buffer in transfers.staging_updates:
            self._of(buffer.request_id).staging[buffer.buffer][buffer.start :] = array(
                "q", buffer.block_ids
            )
        self._users.update(transfers.users)
        edits = [edit for update in transfers.table_updates for edit in self._point(update)]
        return ended, [*self._shown(transfers.row_edits), *self._shown(edits)]

    def _shown(self, edits: Iterable[RowEdit]) -> Iterator[RowEdit]:
        """Yield edits of requests' rows; a trunk's is shown by those of all its users."""
        for edit in edits:
            users = self._users.get(edit.request_id)
            if users is None:
                yield edit
            else:
                yield from (replace(edit, request_id=user) for user in users)

    def _append(self, save: SaveOrder) -> None:
        loads = self._requests[save.request_id]
        for uid in save.uids:
            position = position_of(uid)
            loads.load(save.group, range(position, position + 1))

    def _drop(self, transfers: StepTransfers) -> list[str]:
        ended = []
        for request_id, group in transfers.dropped_tables:
            if group is None:
                gone = self._requests.pop(request_id, None)
                self._users.pop(request_id, None)
                ended.append(request_id)
                if gone is not None and request_id in transfers.num_kept_slots:
                    kept = gone.kept(transfers.num_kept_slots[request_id])
                    self._requests[request_id] = kept
            elif request_id in self._requests:
                self._requests[request_id].drop(group)
        return ended

    def _point(self, update: LoadTableUpdate) -> list[RowEdit]:
        loads = self._of(update.request_id)
        if update.replace:
            loads.tables[update.group] = LoadTable(update.buffer)
            loads.chain = sorted(loads.tables)
        return [
            RowEdit(
                update.request_id,
                update.group,
                positions.start,
                loads.load(update.group, positions).tolist(),
            )
            for positions in update.positions
        ]

    def holders(self, uid: int) -> list[str]:
        """Return the holders that a block's KV is part of: several, if it is a cached prefix."""
        return [name for name, loads in self._requests.items() if loads.holds(uid)]

    def users_of(self, holder: str) -> Sequence[str]:
        """Return the requests whose rows begin with a trunk's; of a request none."""
        return self._users.get(holder, ())

    def of(self, request_ids: list[str]) -> dict[str, RequestLoads]:
        """Return the tables of requests that have some."""
        return {request_id: self._requests[request_id] for request_id in request_ids}

    def _of(self, request_id: str) -> RequestLoads:
        return self._requests.setdefault(request_id, RequestLoads())
