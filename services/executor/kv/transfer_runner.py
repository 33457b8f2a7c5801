"""Carries out each step's transfers on one rank, overlapped with the layers.

Order within a step, on the engine's thread:

    begin      copies out of staging of the last step are complete; what was freed may be
               overwritten; restores start; the first loads of every request start
    before g   the loads of layer group g are complete
    after g    its full blocks go to the host; its staging buffer is free: the load of the
               next group in turn starts; if the next group will *write* a staging buffer that is
               still being copied out (prefill), that copy completes first, for vLLM writes new KV
               before it asks for the layer's load
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from services.executor.kv.copy_engine import (
    BACKGROUND,
    Copy,
    CopyEngine,
    Direction,
    Ticket,
)
from services.executor.kv.metadata import SaveOrder, StepFeedback, StepTransfers


@dataclass(slots=True)
class LoadTable:
    """Slots and blocks of one offloaded group of one request, pairwise."""

    slots: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class RequestLoads:
    """What one request's steps load: a table per offloaded group, in layer order."""

    tables: dict[int, LoadTable] = field(default_factory=dict)
    num_staging: int = 1
    chain: list[int] = field(default_factory=list)  # the tables' groups, ascending

    def buffer_successor(self, group: int) -> int | None:
        """Return the group that uses a group's staging buffer next in the step."""
        position = self.chain.index(group) + self.num_staging
        return self.chain[position] if position < len(self.chain) else None

    def buffer_predecessor(self, group: int) -> int | None:
        position = self.chain.index(group) - self.num_staging
        return self.chain[position] if position >= 0 else None


class TransferRunner:
    """One rank's side of the transfers."""

    def __init__(self, engine: CopyEngine, num_groups: int) -> None:
        self.engine = engine
        self.stall_s = 0.0  # since the engine started
        self.num_steps = 0
        self.num_loads = 0  # layer groups loaded into staging
        # Fills blocks with NaN (True) or zero: poisoning, in tests.
        self.fill: Callable[[list[int], bool], None] | None = None
        self._num_groups = num_groups
        self._requests: dict[str, RequestLoads] = {}
        self._loads: list[list[Ticket]] = [[] for _ in range(num_groups)]  # of this step
        self._saves: list[list[SaveOrder]] = [[] for _ in range(num_groups)]  # still to start
        self._staging_saves: dict[tuple[str, int], Ticket] = {}  # started, possibly not complete
        self._step = 0
        self._step_saves: list[tuple[int, Ticket]] = []  # in step order, not known complete
        self._loading: dict[str, RequestLoads] = {}  # requests of this step
        self._restores: dict[int, Ticket] = {}

    # -- the parts of a step ----------------------------------------------------------------

    def begin_step(self, transfers: StepTransfers) -> None:
        """Take in a step's orders and start what can start before its first layer."""
        self._step = transfers.step
        self.num_steps += 1
        self._wait_all(self._staging_saves.values())
        self._staging_saves.clear()
        if self.fill is not None:
            self.fill(transfers.poisoned_block_ids, True)
            self.fill(transfers.cleared_block_ids, False)
        self._update_tables(transfers)
        for order in transfers.saves:
            self._saves[order.group].append(order)
        for restore_id in transfers.cancelled_restores:
            if restore_id in self._restores:
                self.engine.cancel(self._restores[restore_id])
        for restore in transfers.restores:
            self._restores[restore.restore_id] = self.engine.submit(
                Copy(
                    direction=Direction.H2D,
                    group=restore.group,
                    slots=restore.slots,
                    block_ids=restore.block_ids,
                    urgency=BACKGROUND,
                )
            )
        self._loading = {request_id: self._requests[request_id] for request_id in transfers.loading}
        for loads in self._loading.values():
            for group in loads.chain[: loads.num_staging]:
                self._load(loads, group)

    def before_group(self, group: int) -> None:
        """Return when the group's KV is in its blocks."""
        if self._loads[group]:
            self._wait_all(self._loads[group])
            self._loads[group].clear()

    def after_group(self, group: int) -> None:
        """Start what may follow a group's last layer."""
        if self._saves[group]:
            self._start_saves(group)
        for loads in self._loading.values():
            if group in loads.tables:
                successor = loads.buffer_successor(group)
                if successor is not None:
                    self._load(loads, successor)
        if self._staging_saves:
            self._free_staging_for(group + 1)

    def end_step(self) -> None:
        """Start copies whose group did not run, as in a step without tokens."""
        for group in range(self._num_groups):
            if self._saves[group]:
                self._start_saves(group)

    def feedback(self) -> StepFeedback:
        """Return what has completed; each restore is reported once."""
        while self._step_saves and self._step_saves[0][1].done:
            self._step_saves.pop(0)
        saved_step = self._step_saves[0][0] - 1 if self._step_saves else self._step
        done = [restore_id for restore_id, ticket in self._restores.items() if ticket.done]
        for restore_id in done:
            self.engine.wait(self._restores.pop(restore_id))  # raises if it failed
        return StepFeedback(saved_step=saved_step, num_ranks_done=Counter(done))

    # -- tables -----------------------------------------------------------------------------

    def _update_tables(self, transfers: StepTransfers) -> None:
        for request_id, group in transfers.dropped_tables:
            if group is None:
                self._requests.pop(request_id, None)
            elif request_id in self._requests:
                self._requests[request_id].tables.pop(group, None)
                self._requests[request_id].chain = sorted(self._requests[request_id].tables)
        for request_id, num_staging in transfers.num_staging.items():
            self._requests.setdefault(request_id, RequestLoads()).num_staging = num_staging
        for update in transfers.table_updates:
            loads = self._requests.setdefault(update.request_id, RequestLoads())
            if update.replace:
                loads.tables[update.group] = LoadTable(list(update.slots), list(update.block_ids))
                loads.chain = sorted(loads.tables)
            else:
                table = loads.tables[update.group]
                table.slots.extend(update.slots)
                table.block_ids.extend(update.block_ids)

    # -- copies -----------------------------------------------------------------------------

    def _load(self, loads: RequestLoads, group: int) -> None:
        table = loads.tables[group]
        if not table.slots:
            return
        self.num_loads += 1
        self._loads[group].append(
            self.engine.submit(
                Copy(
                    direction=Direction.H2D,
                    group=group,
                    slots=table.slots,
                    block_ids=table.block_ids,
                    urgency=float(group),
                )
            )
        )

    def _start_saves(self, group: int) -> None:
        for order in self._saves[group]:
            ticket = self.engine.submit(
                Copy(
                    direction=Direction.D2H,
                    group=group,
                    slots=order.slots,
                    block_ids=order.block_ids,
                )
            )
            self._step_saves.append((self._step, ticket))
            if order.from_staging:
                self._staging_saves[(order.request_id, group)] = ticket
        self._saves[group].clear()

    def _free_staging_for(self, group: int) -> None:
        """Wait for the copies out of the staging buffers that a group is about to write."""
        for request_id, loads in self._loading.items():
            if group not in loads.tables:
                continue
            predecessor = loads.buffer_predecessor(group)
            if predecessor is None:
                continue
            ticket = self._staging_saves.pop((request_id, predecessor), None)
            if ticket is not None:
                self.stall_s += self.engine.wait(ticket)

    def _wait_all(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            self.stall_s += self.engine.wait(ticket)


def group_of_layers(groups: Sequence[Sequence[str]]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the group of each group's first layer, and of each group's last layer, by name."""
    first = {names[0]: index for index, names in enumerate(groups) if names}
    last = {names[-1]: index for index, names in enumerate(groups) if names}
    return first, last
