"""Collects between two steps what the next step's message tells the ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import compress

from services.executor.blocks.holder import Holder
from services.executor.step_messages import (
    FoundOrder,
    LoadTableUpdate,
    PrefixSlots,
    RestoreOrder,
    RowEdit,
    SaveOrder,
    StagingUpdate,
    StepTransfers,
    position_of,
)

GroupOf = tuple[str, int]  # holder, layer group


class StepOrders:
    """Pending orders; later ones about the same thing replace earlier ones."""

    def __init__(self) -> None:
        self._step = 0
        self._edits: dict[GroupOf, list[RowEdit]] = {}  # no two of which meet
        self._dropped: dict[tuple[str, int | None], None] = {}
        self._tables: dict[GroupOf, LoadTableUpdate] = {}
        self._num_kept_slots: dict[str, int] = {}
        self._prefixes: dict[str, PrefixSlots] = {}
        self._num_staging: dict[str, int] = {}
        self._staging: dict[tuple[str, int], StagingUpdate] = {}  # by request and buffer
        self._restores: dict[int, RestoreOrder] = {}
        self._found: dict[GroupOf, list[FoundOrder]] = {}
        self._users: dict[str, list[str]] = {}  # of trunks, where they changed
        self._cancelled: list[int] = []
        self._poisoned: list[int] = []
        self._cleared: list[int] = []

    @property
    def next_step(self) -> int:
        return self._step + 1

    def edit_row(self, key: GroupOf, start: int, block_ids: Sequence[int]) -> None:
        """Let a stretch of a row show other blocks, whatever it was to show before."""
        self._forget_edits(key, start, start + len(block_ids))
        self._edits.setdefault(key, []).append(RowEdit(*key, start, list(block_ids)))

    def _forget_edits(self, key: GroupOf, start: int, end: int) -> None:
        if pending := self._edits.get(key):
            pending[:] = [piece for edit in pending for piece in _outside(edit, start, end)]

    def replace_table(self, key: GroupOf, buffer: int) -> None:
        """Let a group use a staging buffer, and load nothing until it is told to."""
        self._tables[key] = LoadTableUpdate(*key, True, buffer, [])

    def append_table(self, key: GroupOf, buffer: int, positions: range) -> None:
        """Load a stretch from now on into the group's buffer, and let its row show that."""
        self._forget_edits(key, positions.start, positions.stop)
        update = self._tables.setdefault(key, LoadTableUpdate(*key, False, buffer, []))
        if update.positions and update.positions[-1].stop == positions.start:
            positions = range(update.positions.pop().start, positions.stop)
        update.positions.append(positions)

    def drop_table(self, key: GroupOf) -> None:
        self._tables.pop(key, None)
        self._dropped[key] = None

    def set_staging(self, request_id: str, num_staging: int) -> None:
        """Let a request have so many staging buffers; new ones are filled by `fill_staging`."""
        self._num_staging[request_id] = num_staging
        for key in [key for key in self._staging if key[0] == request_id and key[1] >= num_staging]:
            del self._staging[key]

    def fill_staging(
        self, request_id: str, buffer: int, start: int, block_ids: Iterable[int] = ()
    ) -> None:
        """Let a buffer have these blocks from a position on, and none behind them."""
        pending = self._staging.get((request_id, buffer))
        if pending is None or start < pending.start:
            pending = self._staging[request_id, buffer] = StagingUpdate(
                request_id, buffer, start, []
            )
        pending.block_ids[start - pending.start :] = block_ids

    def use(self, trunk: str, users: list[str]) -> None:
        """Let the rows of exactly these requests begin with a trunk's."""
        self._users[trunk] = users

    def split(self, holder: str, trunk: str, end: int) -> None:
        """Let a trunk have what is pending of a holder's positions before `end`.

        But for its tables and buffers, which are ordered anew.
        """
        for _, group in [key for key in self._edits if key[0] == holder]:
            edits, self._edits[holder, group] = self._edits[holder, group], []
            for edit in edits:
                edit_end = edit.start + len(edit.block_ids)
                for piece in _outside(edit, 0, end):
                    self._edits[holder, group].append(piece)
                for piece in _outside(edit, end, edit_end):
                    self.edit_row((trunk, group), piece.start, piece.block_ids)
        for number, restore in self._restores.items():
            if restore.request_id == holder:  # what is under way in part has been given up
                self._restores[number] = replace(restore, request_id=trunk)
        for key in [key for key in self._tables if key[0] == holder]:
            positions = self._tables[key].positions
            behind = [range(max(one.start, end), one.stop) for one in positions]
            positions[:] = [one for one in behind if one]
        for _, group in [key for key in self._found if key[0] == holder]:
            for order in self._found.pop((holder, group)):
                front = [position_of(uid) < end for uid in order.uids]
                self._found_in(order, trunk, front)
                self._found_in(order, holder, [not is_front for is_front in front])

    def _found_in(self, order: FoundOrder, holder: str, is_its: Sequence[bool]) -> None:
        """Let a holder have found a part of what an order says."""
        uids, slots, block_ids = (
            list(compress(values, is_its)) for values in (order.uids, order.slots, order.block_ids)
        )
        if uids:
            self.found(FoundOrder(holder, order.group, uids, slots, block_ids))

    def begin_with(self, holder: Holder) -> None:
        """Tell the ranks where on the host a holder's blocks are, some of which others saved."""
        slots = [list(group.host_slots) for group in holder.groups]
        uids = [holder.uid(position) for position in range(len(slots[0]))]
        self._prefixes[holder.request_id] = PrefixSlots(holder.request_id, uids, slots)

    def found(self, order: FoundOrder) -> None:
        """Tell the ranks which blocks a group has taken as they are."""
        self._found.setdefault((order.request_id, order.group), []).append(order)

    def forget_found(self, key: GroupOf) -> None:
        """Say nothing of what a group had found since the last step: it gives it up."""
        self._found.pop(key, None)

    def restore(self, order: RestoreOrder) -> None:
        self._restores[order.restore_id] = order

    def cancel_restore(self, restore_id: int) -> bool:
        """Tell the ranks to forget a restore; False if they have not heard of it yet."""
        if self._restores.pop(restore_id, None) is not None:
            return False
        self._cancelled.append(restore_id)
        return True

    def poison(self, block_ids: Iterable[int]) -> None:
        self._poisoned.extend(block_ids)

    def clear(self, block_ids: Iterable[int]) -> None:
        self._cleared.extend(block_ids)

    def drop_request(self, request_id: str, *, num_kept: int = 0) -> None:
        """Forget all orders about a request and tell the ranks to forget it too.

        But for where its first `num_kept` positions are on the host.
        """
        for pending in (self._edits, self._tables, self._staging, self._found):
            for key in [key for key in pending if key[0] == request_id]:
                del pending[key]
        self._num_staging.pop(request_id, None)
        if num_kept:
            self._num_kept_slots[request_id] = num_kept
        else:
            self._num_kept_slots.pop(request_id, None)
            self._prefixes.pop(request_id, None)
        self._users.pop(request_id, None)
        self._dropped[(request_id, None)] = None

    def take(self, *, loading: list[str], saves: list[SaveOrder]) -> StepTransfers:
        """Return the next step's message and start collecting for the one after."""
        self._step += 1
        message = StepTransfers(
            step=self._step,
            row_edits=[edit for edits in self._edits.values() for edit in _joined(edits)],
            poisoned_block_ids=self._poisoned,
            cleared_block_ids=self._cleared,
            dropped_tables=list(self._dropped),
            table_updates=list(self._tables.values()),
            num_kept_slots=self._num_kept_slots,
            prefixes=list(self._prefixes.values()),
            num_staging=self._num_staging,
            staging_updates=list(self._staging.values()),
            loading=loading,
            saves=saves,
            restores=list(self._restores.values()),
            found=[order for orders in self._found.values() for order in orders],
            cancelled_restores=self._cancelled,
            users=self._users,
        )
        self._edits, self._tables, self._dropped = {}, {}, {}
        self._restores, self._num_kept_slots, self._prefixes = {}, {}, {}
        self._found, self._users = {}, {}
        self._num_staging, self._staging = {}, {}
        self._cancelled, self._poisoned, self._cleared = [], [], []
        return message


def _outside(edit: RowEdit, start: int, end: int) -> list[RowEdit]:
    """Return what is left of an edit outside of `[start, end)`, as it is if that is all of it."""
    edit_end = edit.start + len(edit.block_ids)
    if edit_end <= start or end <= edit.start:
        return [edit]
    before = edit.block_ids[: max(0, start - edit.start)]
    after = edit.block_ids[max(0, end - edit.start) :]
    pieces = [(edit.start, before), (edit_end - len(after), after)]
    return [RowEdit(edit.request_id, edit.group, first, ids) for first, ids in pieces if ids]


def _joined(edits: list[RowEdit]) -> list[RowEdit]:
    """Return the edits of one row, which do not meet, as few stretches."""
    stretches: list[RowEdit] = []
    for edit in sorted(edits, key=lambda edit: edit.start):
        if stretches and stretches[-1].start + len(stretches[-1].block_ids) == edit.start:
            stretches[-1].block_ids.extend(edit.block_ids)
        else:
            stretches.append(edit)
    return stretches
