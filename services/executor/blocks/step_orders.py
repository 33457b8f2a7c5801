"""Collects between two steps what the next step's message tells the ranks."""

from collections.abc import Iterable

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
        self._edits: dict[GroupOf, dict[int, int]] = {}
        self._dropped: dict[tuple[str, int | None], None] = {}
        self._tables: dict[GroupOf, LoadTableUpdate] = {}
        self._generations: dict[str, int] = {}
        self._num_staging: dict[str, int] = {}
        self._restores: dict[int, RestoreOrder] = {}
        self._cancelled: list[int] = []
        self._poisoned: list[int] = []
        self._cleared: list[int] = []

    @property
    def next_step(self) -> int:
        return self._step + 1

    def edit_row(self, key: GroupOf, position: int, block_id: int) -> None:
        self._edits.setdefault(key, {})[position] = block_id

    def replace_table(
        self, key: GroupOf, positions: list[int], slots: list[int], block_ids: list[int]
    ) -> None:
        self._tables[key] = LoadTableUpdate(*key, True, positions, slots, block_ids)

    def append_table(self, key: GroupOf, position: int, slot: int, block_id: int) -> None:
        update = self._tables.get(key)
        if update is None:
            update = self._tables[key] = LoadTableUpdate(*key, False, [], [], [])
        update.positions.append(position)
        update.slots.append(slot)
        update.block_ids.append(block_id)

    def extend_table(self, save: SaveOrder) -> None:
        """Load from the next step on what a save takes out of staging."""
        key = (save.request_id, save.group)
        for position, slot, block_id in zip(
            save.positions, save.slots, save.block_ids, strict=True
        ):
            self.append_table(key, position, slot, block_id)

    def drop_table(self, key: GroupOf) -> None:
        self._tables.pop(key, None)
        self._dropped[key] = None

    def begin(self, request_id: str, generation: int) -> None:
        self._generations[request_id] = generation

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
        self._generations.pop(request_id, None)
        self._dropped[(request_id, None)] = None

    def take(self, *, loading: list[str], saves: list[SaveOrder]) -> StepTransfers:
        """Return the next step's message and start collecting for the one after."""
        self._step += 1
        message = StepTransfers(
            step=self._step,
            row_edits=[
                edit for key, edits in self._edits.items() for edit in _contiguous(key, edits)
            ],
            poisoned_block_ids=self._poisoned,
            cleared_block_ids=self._cleared,
            dropped_tables=list(self._dropped),
            table_updates=list(self._tables.values()),
            generations=self._generations,
            num_staging=self._num_staging,
            loading=loading,
            saves=saves,
            restores=list(self._restores.values()),
            cancelled_restores=self._cancelled,
        )
        self._edits, self._tables, self._dropped = {}, {}, {}
        self._generations, self._num_staging, self._restores = {}, {}, {}
        self._cancelled, self._poisoned, self._cleared = [], [], []
        return message


def _contiguous(key: GroupOf, edits: dict[int, int]) -> list[RowEdit]:
    """Return the edits of one row as few contiguous stretches."""
    stretches: list[RowEdit] = []
    for position in sorted(edits):
        if stretches and stretches[-1].start + len(stretches[-1].block_ids) == position:
            stretches[-1].block_ids.append(edits[position])
        else:
            stretches.append(RowEdit(*key, position, [edits[position]]))
    return stretches
