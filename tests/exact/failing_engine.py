"""A copy engine under the integrity guard of a rank whose copies fail, hang or change bytes.

Put into a rank by `install`, which runs in the rank's own process; nothing of the product knows.
"""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from services.executor.copies.copy_engine import (
    FOR_EVER,
    Copy,
    CopyFailedError,
    CopyHungError,
    Direction,
    TransferTotals,
)
from services.executor.copies.copy_watch import Patience

SUBMISSIONS_UNTIL_LATE_WRITE = 40  # of other copies, before a hung one writes after all
SWEEPS_UNTIL_LATE = 20  # before a copy counts as hung


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRates:
    """The share of copies that go wrong in one way, each in [0, 1]."""

    load_fails: float = 0.0
    load_hangs: float = 0.0
    load_changes: float = 0.0  # other bytes arrive
    save_fails: float = 0.0
    save_hangs: float = 0.0
    save_changes: float = 0.0  # bytes change at rest
    ranks: frozenset[int] | None = None  # where; None: on all


@dataclass(slots=True, eq=False)
class FaultDraw:
    """Spoils one of every 1 / rate copies in each way, a random one of them.

    So a run of that many copies has a fault of each kind for certain.
    """

    rates: FaultRates
    rng: random.Random
    _due: dict[str, deque[str]] = field(default_factory=lambda: {"load": deque(), "save": deque()})
    _draws: dict[str, Iterator[bool]] = field(default_factory=dict)

    def draw(self, copy: Copy) -> str:
        """Return how the next copy goes wrong: "fails", "hangs", "changes", or "" for not."""
        name = "load" if copy.direction is Direction.H2D else "save"
        due = self._due[name]
        for kind in ("fails", "hangs", "changes"):
            rate = getattr(self.rates, f"{name}_{kind}")
            if rate and next(self._draws.setdefault(f"{name}_{kind}", self._one_in(rate))):
                due.append(kind)
        return due.popleft() if due else ""

    def _one_in(self, rate: float) -> Iterator[bool]:
        period = round(1 / rate)
        while True:
            spoiled = self.rng.randrange(period)
            yield from (number == spoiled for number in range(period))


@dataclass(slots=True, eq=False)
class FaultyTicket:
    waits_for_layers: ClassVar[bool] = False
    copy: Copy
    inner: Any = None  # None: not carried out
    fault: str = ""
    due: int = 0  # hung: when it writes, in submissions
    cancelled: bool = False

    @property
    def done(self) -> bool:
        if self.fault == "hangs":
            return self.inner is not None and bool(self.inner.done)
        return self.fault == "fails" or bool(self.inner.done)


class FailingEngine:
    """Carries copies out on a real engine, but for those that it spoils."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.num_faults = {"fails": 0, "hangs": 0, "changes": 0}
        self.spoil(FaultRates())
        self._num_submitted = 0
        self._hung: list[FaultyTicket] = []

    def spoil(self, rates: FaultRates, seed: int = 0) -> None:
        """Let these shares of the copies go wrong from now on."""
        self._faults = FaultDraw(rates, random.Random(seed))

    def submit(self, copy: Copy) -> FaultyTicket:
        self._num_submitted += 1
        self._write_late()
        fault = self._faults.draw(copy) if copy.slots else ""
        ticket = FaultyTicket(copy, fault=fault)
        if fault:
            self.num_faults[fault] += 1
        if fault == "hangs":
            ticket.due = self._num_submitted + SUBMISSIONS_UNTIL_LATE_WRITE
            self._hung.append(ticket)
        elif fault != "fails":
            ticket.inner = self.engine.submit(copy)
        return ticket

    def _write_late(self) -> None:
        for ticket in [t for t in self._hung if t.due <= self._num_submitted]:
            self._hung.remove(ticket)
            ticket.inner = self.engine.submit(ticket.copy)
            self.engine.wait(ticket.inner)

    def wait(self, ticket: Any, timeout_s: float = FOR_EVER) -> float:
        if not isinstance(ticket, FaultyTicket):  # submitted before the faults began
            return float(self.engine.wait(ticket))
        if ticket.fault == "fails" and not ticket.cancelled:
            raise CopyFailedError("made to fail")
        if ticket.fault == "hangs" and ticket.inner is None:
            raise CopyHungError("held back")
        if ticket.inner is None:
            return 0.0
        waited_s = float(self.engine.wait(ticket.inner))  # it ends; only what hangs is late
        if ticket.fault == "changes":
            ticket.fault = ""
            self._change(ticket.copy)
        return waited_s

    def _change(self, copy: Copy) -> None:
        pages = self.engine._pages[copy.group]
        if copy.direction is Direction.H2D:
            pages.pool[0][copy.block_ids[-1], 5] ^= 0x7F
        else:
            pages.host[0][copy.slots[-1], 5] ^= 0x7F

    def cancel(self, ticket: Any) -> None:
        if not isinstance(ticket, FaultyTicket):
            self.engine.cancel(ticket)
            return
        ticket.cancelled = True
        if ticket.inner is not None:
            self.engine.cancel(ticket.inner)

    def totals(self) -> TransferTotals:
        totals: TransferTotals = self.engine.totals()
        return totals

    def close(self) -> None:
        self.engine.close()


class SweepClock:
    """Counts the sweeps of a watch, one a step: no other work on the machine makes a copy late."""

    def __init__(self, watch: Any) -> None:
        self._num_sweeps = 0
        self._sweep = watch.sweep
        watch.sweep = self._count

    def _count(self) -> None:
        self._num_sweeps += 1
        self._sweep()

    def __call__(self) -> float:
        return float(self._num_sweeps)


def install(worker: Any, rates: FaultRates, seed: int) -> None:
    """Let copies of this rank go wrong from now on, and wait for none of them for long."""
    runner, rank = _of_this_process()
    guard = runner.watch.engine
    if not isinstance(guard.engine, FailingEngine):
        guard.engine = FailingEngine(guard.engine)
    here = rates.ranks is None or rank in rates.ranks
    guard.engine.spoil(rates if here else FaultRates(), seed)
    watch = runner.watch
    watch._patience = Patience(least_s=SWEEPS_UNTIL_LATE)
    if not isinstance(watch._clock, SweepClock):
        watch._clock = SweepClock(watch)


def heal(worker: Any) -> dict[str, int]:
    """End all faults; return how many there were of each kind on this rank."""
    runner, _ = _of_this_process()
    engine = runner.watch.engine.engine
    engine.spoil(FaultRates())
    runner.watch._patience = Patience(least_s=FOR_EVER)
    for ticket in engine._hung:
        ticket.due = 0
    engine._write_late()
    counts = dict(engine.num_faults)
    engine.num_faults = dict.fromkeys(counts, 0)
    return counts


def _of_this_process() -> tuple[Any, int]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    return connector.runner, connector._vllm_config.parallel_config.rank
