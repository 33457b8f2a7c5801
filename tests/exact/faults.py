"""Copy engines that make one mistake: negative controls, which a run must notice."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from services.executor.copies.copy_engine import FOR_EVER, Copy, Direction, TransferTotals
from services.executor.copies.device.cpu_device import CpuDevice, LinkModel
from services.executor.copies.device.stream_copy_engine import StreamCopyEngine
from services.executor.copies.pages import fill


@contextlib.contextmanager
def swapped(transfers: Any, engine: Any) -> Iterator[None]:
    """Let a rank's copies run through another engine; each engine sees its own tickets only."""

    def settle() -> None:
        for save in transfers._running_saves:
            transfers.watch.wait(save.copy)

    settle()
    usual, transfers.watch.engine = transfers.watch.engine, engine
    guard, transfers._late_guard = transfers._late_guard, None  # it has not seen these copies
    engine.totals = usual.totals  # running sums never fall
    try:
        yield
    finally:
        settle()
        transfers.watch.engine, transfers._late_guard = usual, guard


@contextlib.contextmanager
def spoiling(fault: "Callable[[Any], FaultyEngine]") -> Iterator["FaultyEngine"]:
    """Let the copies of the engine in this process run through a faulty one, past the guard."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    transfers: Any = get_kv_transfer_group().runner
    faulty = fault(transfers.engine.engine)
    with swapped(transfers, faulty):
        yield faulty
    faulty.end()


class FaultyEngine:
    """Passes everything on to a real engine; subclasses spoil one thing."""

    def __init__(self, engine: Any, first_fault: int = 20) -> None:
        self.engine = engine
        self.num_faults = 0
        self._num_loads = 0
        self._first_fault = first_fault

    def _spoils(self, copy: Copy) -> bool:
        """Whether this copy is spoiled: every fifth load once some have been right."""
        if copy.direction is not Direction.H2D or not copy.slots:
            return False
        self._num_loads += 1
        spoilt = self._num_loads >= self._first_fault and self._num_loads % 5 == 0
        self.num_faults += spoilt
        return spoilt

    def submit(self, copy: Copy) -> Any:
        return self.engine.submit(copy)

    def wait(self, ticket: Any, timeout_s: float = FOR_EVER) -> float:
        return float(self.engine.wait(ticket, timeout_s))

    def cancel(self, ticket: Any) -> None:
        self.engine.cancel(ticket)

    def totals(self) -> TransferTotals:
        totals: TransferTotals = self.engine.totals()
        return totals

    def close(self) -> None:
        self.engine.close()

    def end(self) -> None:
        """End what is this engine's own."""


class DropsCopies(FaultyEngine):
    """Forgets some loads."""

    def submit(self, copy: Copy) -> Any:
        if not self._spoils(copy):
            return self.engine.submit(copy)
        fill(self.engine._pages[copy.group], copy.block_ids, nan=True)
        return self.engine.submit(replace(copy, slots=[], block_ids=[]))


class MistakesBlocks(FaultyEngine):
    """Loads the first slot's block where the last one's belongs: finite, and wrong."""

    def submit(self, copy: Copy) -> Any:
        if len(copy.slots) > 1 and self._spoils(copy):
            return self.engine.submit(replace(copy, slots=[*copy.slots[:-1], copy.slots[0]]))
        return self.engine.submit(copy)


class SkipsWaits(FaultyEngine):
    """Does not wait for some loads."""

    def __init__(self, engine: Any, first_fault: int = 20) -> None:
        super().__init__(engine, first_fault)
        self._skipped: set[int] = set()

    def submit(self, copy: Copy) -> Any:
        ticket = self.engine.submit(copy)
        if self._spoils(copy):
            self._skipped.add(id(ticket))
        return ticket

    def wait(self, ticket: Any, timeout_s: float = FOR_EVER) -> float:
        return 0.0 if id(ticket) in self._skipped else super().wait(ticket, timeout_s)


class SkipsSaveWaits(FaultyEngine):
    """Does not wait until a staging buffer has been copied out before the next group writes it."""

    def __init__(self, engine: Any, first_fault: int = 20) -> None:
        # So slow that the next group always comes first.
        device = CpuDevice(d2h=LinkModel(bytes_per_s=5e6))
        slow = StreamCopyEngine(engine._pages, device, poison_targets=True)
        super().__init__(slow, first_fault)

    def end(self) -> None:
        self.engine.close()

    def wait(self, ticket: Any, timeout_s: float = FOR_EVER) -> float:
        if ticket.copy.direction is Direction.D2H and not ticket.done:
            self.num_faults += 1
            return 0.0
        return super().wait(ticket, timeout_s)


class HurriesSaves(FaultyEngine):
    """Says that the first request's copies to the host are complete before a byte has moved."""

    def submit(self, copy: Copy) -> Any:
        if copy.direction is Direction.D2H and copy.identities[0].request_id == "first":
            self.num_faults += 1
            copy = replace(copy, slots=[], block_ids=[])
        return super().submit(copy)
