"""Collects between two steps what the next step's message tells the ranks."""

from collections.abc import Iterable, Sequence

from services.executor.step_messages import (
    LoadTableUpdate,
    RestoreOrder,
    RowEdit,
    SaveOrder,
    StepTransfers,
)

GroupOf = tuple[str, int]  # request id, layer group


class StepOrders:
    """Pending orders; later ones about the same thing replace earlier ones."""

    def __init__(self) -> None:
        self._step = 0
        self._edits: dict[GroupOf, list[RowEdit]] = {}  # no two of which meet
        self._dropped: dict[tuple[str, int | None], None] = {}
        self._tables: dict[GroupOf, LoadTableUpdate] = {}
        self._num_staging: dict[str, int] = {}
        self._restores: dict[int, RestoreOrder] = {}
        self._cancelled: list[int] = []
        self._poisoned: list[int] = []
        self._cleared: list[int] = []

    @property
    def next_step(self) -> int:
        return self._step + 1

    def edit_row(self, key: GroupOf, position: int, block_id: int) -> None:
        self.edit_rows(key, position, [block_id])

    def edit_rows(self, key: GroupOf, start: int, block_ids: Sequence[int]) -> None:
        """Let a stretch of a row show other blocks, whatever it was to show before."""
        pending = self._edits.setdefault(key, [])
        end = start + len(block_ids)
        if pending and pending[-1].start + len(pending[-1].block_ids) == start:
            last = pending[-1]
            if all(edit.start < start for edit in pending):  # as rows are sealed, in their order
                last.block_ids.extend(block_ids)
                return
        kept = [piece for edit in pending for piece in _outside(edit, start, end)]
        self._edits[key] = [*kept, RowEdit(*key, start, list(block_ids))]

    def replace_table(
        self, key: GroupOf, uids: list[int], slots: list[int], block_ids: list[int]
    ) -> None:
        self._tables[key] = LoadTableUpdate(*key, True, uids, slots, block_ids)

    def append_table(
        self,
        key: GroupOf,
        uids: Iterable[int],
        slots: Iterable[int],
        block_ids: Iterable[int],
    ) -> None:
        update = self._tables.get(key)
        if update is None:
            update = self._tables[key] = LoadTableUpdate(*key, False, [], [], [])
        update.uids.extend(uids)
        update.slots.extend(slots)
        update.block_ids.extend(block_ids)

    def extend_table(self, save: SaveOrder) -> None:
        """Load from the next step on what a save takes out of staging."""
        key = (save.request_id, save.group)
        self.append_table(key, save.uids, save.slots, save.block_ids)

    def drop_table(self, key: GroupOf) -> None:
        self._tables.pop(key, None)
        self._dropped[key] = None

    def set_staging(self, request_id: str, num_staging: int) -> None:
        self._num_staging[request_id] = num_staging

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

    def drop_request(self, request_id: str) -> None:
        """Forget all orders about a request and tell the ranks to forget it too."""
        for pending in (self._edits, self._tables):
            for key in [key for key in pending if key[0] == request_id]:
                del pending[key]
        self._num_staging.pop(request_id, None)
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
            num_staging=self._num_staging,
            loading=loading,
            saves=saves,
            restores=list(self._restores.values()),
            cancelled_restores=self._cancelled,
        )
        self._edits, self._tables, self._dropped = {}, {}, {}
        self._num_staging, self._restores = {}, {}
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
