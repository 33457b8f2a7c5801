"""Carries out each step's transfers on one rank, overlapped with the layers.

Order within a step, on the engine's thread:

    take in    what loads copy, and what rows show, changes
    begin      copies out of staging of the last step are complete; what was freed may be
               overwritten; restores start; the first loads of every request start
    before g   the loads of layer group g are complete
    after g    its full blocks go to the host; its staging buffer is free: the load of the
               next group in turn starts; if the next group will *write* a staging buffer that is
               still being copied out (prefill), that copy completes first, for vLLM writes new KV
               before it asks for the layer's load

A copy that goes wrong never stops a step: other ranks are in the middle of the same one. The
layers run on with whatever is there, the request is *lost* on this rank until the scheduler has
ended it, and the feedback says so together with the tokens that must be dropped.
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from services.executor.copies.copy_engine import (
    BACKGROUND,
    Copy,
    CopyEngine,
    Direction,
    Identity,
    LateGuard,
)
from services.executor.copies.copy_watch import CopyWatch, Patience, WatchedCopy
from services.executor.copies.load_tables import LoadTable, LoadTables, RequestLoads
from services.executor.step_messages import (
    FailureCause,
    FoundOrder,
    RestoreOrder,
    RowEdit,
    SaveOrder,
    StepFeedback,
    StepTransfers,
)

T = TypeVar("T")
Part = tuple[
    str, SaveOrder | RestoreOrder | FoundOrder | LoadTable
]  # of a copy: whose, and which blocks


@dataclass(slots=True)
class RunningSave:
    step: int
    # One layer group's, of different requests; without those that have ended or begun anew.
    orders: list[SaveOrder]
    copy: WatchedCopy


@dataclass(frozen=True, slots=True)
class RunningLoad:
    request_ids: list[str]
    copy: WatchedCopy  # of one layer group of theirs


class TransferRunner:
    """One rank's side of the transfers."""

    def __init__(
        self,
        engine: CopyEngine,
        num_groups: int,
        *,
        num_side_groups: int = 0,
        patience: Patience | None = None,
        late_guard: LateGuard | None = None,
    ) -> None:
        """`num_side_groups`: that no layer waits for; they come after the `num_groups` others."""
        self.watch = CopyWatch(engine, patience or Patience())
        self.num_steps = 0
        self.num_loads = 0  # layer groups loaded into staging
        # Fills blocks with NaN (True) or zero: poisoning, in tests.
        self.fill: Callable[[list[int], bool], None] | None = None
        self._late_guard = late_guard
        self._num_groups = num_groups
        self._tables = LoadTables(num_groups)
        self._loads: list[list[RunningLoad]] = [[] for _ in range(num_groups)]  # of this step
        # What each group loaded last, by tables, which only grow.
        self._last_loads: dict[int, tuple[list[tuple[str, LoadTable, int]], Copy]] = {}
        num_all = num_groups + num_side_groups
        self._saves: list[list[SaveOrder]] = [[] for _ in range(num_all)]  # still to start
        self._staging_saves: dict[tuple[str, int], WatchedCopy] = {}  # possibly not complete
        self._step = 0
        self._running_saves: deque[RunningSave] = deque()  # in step order, not known complete
        self._loading: dict[str, RequestLoads] = {}  # requests of this step
        self._restores: dict[int, WatchedCopy] = {}
        self._num_groups_begun = 0  # in this step
        self._lost: dict[str, FailureCause] = {}  # requests whose KV here is wrong
        self._newly_lost: dict[str, FailureCause] = {}  # of this step
        self._ended: list[str] = []  # requests, with this step

    @property
    def engine(self) -> CopyEngine:
        return self.watch.engine

    @property
    def stall_s(self) -> float:
        """Waited for copies, since the start."""
        return self.watch.stall_s

    # -- the parts of a step ----------------------------------------------------------------

    def take_in(self, transfers: StepTransfers) -> list[RowEdit]:
        """Take in what a step changes, before `begin_step`; return all edits of rows."""
        self._ended, edits = self._tables.update(transfers)
        return edits

    def begin_step(self, transfers: StepTransfers) -> None:
        """Start what can start before a step's first layer."""
        self._step = transfers.step
        self.num_steps += 1
        for (request_id, _), copy in self._staging_saves.items():
            self._await([request_id], copy)
        self._staging_saves.clear()
        self._forget(self._ended)
        if self.fill is not None:
            self.fill(transfers.poisoned_block_ids, True)
            self.fill(transfers.cleared_block_ids, False)
        if self._late_guard is not None:
            for found in transfers.found:
                parts = [(found.request_id, found)]
                self._late_guard.check(self._copy(Direction.H2D, found.group, parts, urgency=0.0))
        self._take_in_saves(transfers.saves)
        for restore_id in transfers.cancelled_restores:
            if restore_id in self._restores:
                self.watch.cancel(self._restores[restore_id])
        for restore in transfers.restores:
            self._restores[restore.restore_id] = self._submit(
                Direction.H2D,
                restore.group,
                [(restore.request_id, restore)],
                urgency=BACKGROUND,
            )
        self._num_groups_begun = 0
        self._loading = self._tables.of(transfers.loading)
        self._start_loads(
            (group, request_id)
            for request_id, loads in self._loading.items()
            for group in loads.chain[: loads.num_staging]
        )

    def _take_in_saves(self, saves: Iterable[SaveOrder]) -> None:
        for order in saves:
            self._saves[order.group].append(order)
        for group in range(self._num_groups, len(self._saves)):
            if self._saves[group]:  # of requests that are in no step
                self._start_saves(group)

    def _forget(self, ended: Sequence[str]) -> None:
        for request_id in ended:
            self._lost.pop(request_id, None)
            self._newly_lost.pop(request_id, None)
        for save in self._running_saves if ended else ():
            left = [
                order
                for order in save.orders
                # Where others share its first block by now, they wait for the copy.
                if order.request_id not in ended or self._tables.holders(order.uids[0])
            ]
            if save.orders and not left:
                self.watch.cancel(save.copy)
            save.orders = left

    @property
    def has_work_between_layers(self) -> bool:
        """Whether `before_group` and `after_group` are needed in this step."""
        return bool(self._loading or self._staging_saves or any(self._saves))

    def before_group(self, group: int) -> None:
        """Return when the group's KV is in its blocks, or is known not to come."""
        self._num_groups_begun += 1
        self._await_loads(group)

    def _await_loads(self, group: int) -> None:
        for load in self._loads[group]:
            self._await(load.request_ids, load.copy)
        self._loads[group].clear()

    def after_group(self, group: int) -> None:
        """Start what may follow a group's last layer."""
        if self._saves[group]:
            self._start_saves(group)
        self._start_loads(
            (successor, request_id)
            for request_id, loads in self._loading.items()
            if group in loads.tables and (successor := loads.buffer_successor(group)) is not None
        )
        if self._staging_saves:
            self._free_staging_for(group + 1)

    def end_step(self) -> None:
        """Start copies whose group did not run, as in a step without tokens.

        Loads that no layer asked for are waited for: their staging may be another's next.
        """
        for group in range(self._num_groups):
            if self._saves[group]:
                self._start_saves(group)
        if self._num_groups_begun < self._num_groups:  # layers ran without asking for their KV
            for group in range(self._num_groups):
                self._await_loads(group)
            for request_id in self._loading:
                self._lose(request_id, FailureCause.FAILED)

    def feedback(self) -> StepFeedback:
        """Return what has completed and what went wrong; each restore and failure once.

        Not within a step: what has yet to begin would count as complete.
        """
        assert not any(self._saves), "feedback of a step that has not ended"
        self.watch.sweep()
        failed_saves = self._end_saves()
        done, failed_restores = self._end_restores()
        self._lose_what_was_wrong()  # by the waits above too
        saved_step = self._running_saves[0].step - 1 if self._running_saves else self._step
        lost, self._newly_lost = self._newly_lost, {}
        hung_blocks, hung_slots = self.watch.hung_targets()
        return StepFeedback(
            step=self._step,
            saved_step=saved_step,
            num_ranks_done=done,
            lost_requests=lost,
            failed_saves=failed_saves,
            failed_restores=failed_restores,
            hung_blocks=hung_blocks,
            hung_slots=hung_slots,
        )

    def _lose_what_was_wrong(self) -> None:
        """Lose requests that have KV now which came back wrong: in this step, or in earlier ones
        whose tokens have left.
        """
        for uid in self._late_guard.take_wrong() if self._late_guard is not None else ():
            self.watch.failures[FailureCause.CORRUPT] += 1
            for request_id in self._tables.holders(uid):
                self._lose(request_id, FailureCause.CORRUPT)

    def _end_saves(self) -> dict[tuple[int, str, int], FailureCause]:
        failed: dict[tuple[int, str, int], FailureCause] = {}
        while self._running_saves and self.watch.poll(self._running_saves[0].copy):
            save = self._running_saves.popleft()
            cause = self.watch.wait(save.copy)
            if cause is None:
                continue
            for order in save.orders:
                if order.from_staging:  # the only copy there was
                    self._lose(order.request_id, cause)
                else:
                    failed[(save.step, order.request_id, order.group)] = cause
        return failed

    def _end_restores(self) -> tuple[Counter[int], dict[int, FailureCause]]:
        done: Counter[int] = Counter()
        failed: dict[int, FailureCause] = {}
        for restore_id, copy in list(self._restores.items()):
            if not self.watch.poll(copy):
                continue
            was_known = copy.settled
            cause = self.watch.wait(copy)
            if cause is not None and not was_known:
                failed[restore_id] = cause
            if copy.done:
                done[restore_id] = 1
                del self._restores[restore_id]
        return done, failed

    # -- copies -----------------------------------------------------------------------------

    def _start_loads(self, due: Iterable[tuple[int, str]]) -> None:
        """Start loads of (layer group, request), the earliest needed first."""
        tables: dict[int, list[tuple[str, LoadTable]]] = {}
        for group, request_id in due:
            table = self._loading[request_id].tables[group]
            if table.slots and request_id not in self._lost:
                tables.setdefault(group, []).append((request_id, table))
        for group in sorted(tables):
            self.num_loads += len(tables[group])
            for parts in self._sharing(tables[group]):
                copy = self.watch.submit(self._load_of(group, parts))
                self._loads[group].append(RunningLoad([name for name, _ in parts], copy))

    def _load_of(self, group: int, parts: Sequence[tuple[str, LoadTable]]) -> Copy:
        """Return a group's load: the same object as long as the same is loaded."""
        what = [(name, table, len(table.slots)) for name, table in parts]
        last = self._last_loads.get(group)
        if last is None or last[0] != what:
            copy = self._copy(Direction.H2D, group, parts, urgency=float(group))
            last = self._last_loads[group] = what, copy
        return last[1]

    def _start_saves(self, group: int) -> None:
        # The next group may wait for those out of staging, and for none of the others.
        alone = [[order] for order in self._saves[group] if order.from_staging]
        others = [order for order in self._saves[group] if not order.from_staging]
        for orders in [*alone, *self._sharing(others)]:
            parts = [(order.request_id, order) for order in orders]
            copy = self._submit(Direction.D2H, group, parts)
            self._running_saves.append(RunningSave(self._step, orders, copy))
            for order in orders:
                if order.from_staging:
                    self._staging_saves[(order.request_id, group)] = copy
        self._saves[group].clear()

    def _sharing(self, wanted: list[T]) -> list[list[T]]:
        """Return which of a group's copies in one direction are made as one: all of them.

        Once a copy has gone wrong on this rank each goes alone, so that the next failure is one
        request's.
        """
        if self.watch.failures:
            return [[one] for one in wanted]
        return [wanted] if wanted else []

    def _submit(
        self, direction: Direction, group: int, parts: Sequence[Part], *, urgency: float = 0.0
    ) -> WatchedCopy:
        """Submit one copy of all parts, which are of one layer group."""
        return self.watch.submit(self._copy(direction, group, parts, urgency=urgency))

    def _copy(
        self, direction: Direction, group: int, parts: Sequence[Part], *, urgency: float
    ) -> Copy:
        slots, block_ids = array("q"), array("q")
        for _, part in parts:
            slots.extend(part.slots)
            block_ids.extend(part.block_ids)
        return Copy(
            direction=direction,
            group=group,
            slots=slots,
            block_ids=block_ids,
            urgency=urgency,
            identities=tuple(Identity(request_id=name, uids=part.uids) for name, part in parts),
        )

    def _free_staging_for(self, group: int) -> None:
        """Wait for the copies out of the staging buffers that a group is about to write."""
        for request_id, loads in self._loading.items():
            if group not in loads.tables:
                continue
            predecessor = loads.buffer_predecessor(group)
            if predecessor is None:
                continue
            copy = self._staging_saves.pop((request_id, predecessor), None)
            if copy is not None:
                self._await([request_id], copy)

    def _await(self, request_ids: Sequence[str], copy: WatchedCopy) -> None:
        """Return when a copy is done or late; its requests are lost if it went wrong."""
        cause = self.watch.wait(copy)
        if cause is not None:
            for request_id in request_ids:
                self._lose(request_id, cause)

    def _lose(self, holder: str, cause: FailureCause) -> None:
        """Take in that a request's KV is wrong, or a trunk's, and so that of all its users."""
        for name in (holder, *self._tables.users_of(holder)):
            if name not in self._lost:
                self._lost[name] = self._newly_lost[name] = cause


def group_of_layers(groups: Sequence[Sequence[str]]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the group of each group's first layer, and of each group's last layer, by name."""
    first = {names[0]: index for index, names in enumerate(groups) if names}
    last = {names[-1]: index for index, names in enumerate(groups) if names}
    return first, last
