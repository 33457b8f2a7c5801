"""A device whose streams run as late as they may, in any legal order, watching every row.

Work is carried out only when it is waited for or asked about, in an order drawn at random, so that
a copy that is not ordered after its source shows in the bytes. Besides, every access is checked
when it is enqueued: two accesses to one row, of which one writes, must be ordered by streams,
events and what the host knows (vector clocks), whatever order they happen to run in.
"""

import math
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.executor.copies.copy_engine import Direction
from services.executor.copies.streams import OnFailure, Part, RowCopy, Rows, ends_within

Clock = dict[int, int]  # per stream: how many of its operations come before


def merge(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


def precedes(stream: int, count: int, clock: Clock) -> bool:
    return clock.get(stream, 0) >= count


@dataclass(eq=False)
class Operation:
    work: Callable[[], None]
    after: tuple["FakeEvent", ...] = ()


@dataclass(eq=False)
class FakeEvent:
    device: "FakeDevice"
    clock: Clock
    passed: bool = False
    time_s: float = 0.0

    def query(self) -> bool:
        with self.device.lock:
            self.device.run_some()
            if not self.passed or self.time_s > self.device.host_s:
                return False
            self.device.host_learns(self.clock)
            return True

    def synchronize(self) -> None:
        while True:
            with self.device.lock:
                if not self.device.stalled and self.device.run_until(self):
                    self.device.host_learns(self.clock)
                    return
            self.device.waited.set()
            self.device.resumed.wait()

    def elapsed_s(self, end: Any) -> float:
        assert self.passed
        assert end.passed
        return float(end.time_s - self.time_s)


@dataclass(eq=False)
class FakeStream:
    device: "FakeDevice"
    number: int
    time_s: float = 0.0  # copies take it, and what is said to
    clock: Clock = field(default_factory=dict)
    queue: deque[Operation] = field(default_factory=deque)
    awaits: tuple[FakeEvent, ...] = ()  # by the next operation

    def record(self, *, timing: bool = False) -> FakeEvent:
        with self.device.lock:
            event = FakeEvent(self.device, {})

            def work() -> None:
                event.passed, event.time_s = True, self.time_s

            event.clock = self.enqueue(work)
            return event

    def wait(self, event: Any, timeout_s: float = math.inf) -> bool:
        with self.device.lock:
            self.device.num_waits += 1
            if self.device.num_waits != self.device.forgotten_wait:
                merge(self.clock, event.clock)
                self.awaits = (*self.awaits, event)
        return True

    def close(self, timeout_s: float) -> bool:
        return ends_within(self, timeout_s)

    def enqueue(self, work: Callable[[], None]) -> Clock:
        """Put an operation at the end, and return what comes up to and with it."""
        merge(self.clock, self.device.host_clock)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        self.queue.append(Operation(work, self.awaits))
        self.awaits = ()
        return dict(self.clock)


@dataclass
class Accesses:
    """The accesses to one row that later ones can conflict with."""

    write: tuple[int, int] | None = None  # stream, count
    reads: dict[int, int] = field(default_factory=dict)


class FakeDevice:
    """`Device` on matrices in host memory."""

    max_chunks_ahead = 4

    def __init__(self, seed: int = 0, *, bytes_per_s: float = 1e9) -> None:
        self.lock = threading.RLock()
        self.resumed = threading.Event()  # clear while nothing runs
        self.resumed.set()
        self.waited = threading.Event()  # some thread waits for a stalled device
        self.races: list[str] = []
        self.num_waits = 0  # of streams for events
        self.forgotten_wait = 0  # the number of one that is left out: a mistake to be found
        self.fails: Callable[[Sequence[RowCopy]], bool] | None = None  # whose copy raises
        self.copied_rows: list[tuple[int, list[int]]] = []  # target matrix and rows, as they ran
        self.host_clock: Clock = {}
        self.host_s = math.inf  # the host asks now: what takes until later has not passed
        self.attached: set[int] = set()
        self._rng = random.Random(seed)
        self._bytes_per_s = bytes_per_s
        self._streams: list[FakeStream] = []
        self._accesses: dict[int, Accesses] = {}  # by where a row begins
        self.compute = self.new_stream()

    @property
    def stalled(self) -> bool:
        """Nothing runs: a device that is busy with something long."""
        return not self.resumed.is_set()

    def stall(self) -> None:
        self.resumed.clear()

    def resume(self) -> None:
        self.resumed.set()

    # -- what engines see -------------------------------------------------------------------

    def attach(self) -> None:
        self.attached.add(threading.get_ident())

    def compute_stream(self) -> FakeStream:
        return self.compute

    def new_stream(self, direction: Direction | None = None) -> FakeStream:
        with self.lock:
            self._streams.append(FakeStream(self, len(self._streams)))
            return self._streams[-1]

    def copy(self, stream: Any, part: Part, *, source_is_stable: bool, failed: OnFailure) -> None:
        copies = part.copies()
        with self.lock:
            if self.fails is not None and self.fails(copies):
                raise RuntimeError("the device refused a copy")
            clock = stream.enqueue(lambda: self._carry_out(stream, copies))
            for copy in copies:
                # A source that is read out of turn must be complete as the host knows it.
                known = dict(self.host_clock) if source_is_stable else clock
                self._read(copy.source, copy.source_rows, stream.number, clock, known)
                self._write(copy.target, copy.target_rows, stream.number, clock)

    def fill(self, rows: torch.Tensor, indices: npt.NDArray[np.int64], byte: int) -> None:
        self.write(rows, indices.tolist(), lambda: rows.numpy().__setitem__(indices, byte))

    def calculate(
        self, work: Callable[[], None], *, reads: Sequence[Rows], writes: Sequence[Rows]
    ) -> None:
        with self.lock:
            clock = self.compute.enqueue(work)
            for matrix, indices in reads:
                self._read(matrix, indices.tolist(), self.compute.number, clock, clock)
            for matrix, indices in writes:
                self._write(matrix, indices.tolist(), self.compute.number, clock)

    # -- what a model does on the compute stream --------------------------------------------

    def write(self, rows: torch.Tensor, indices: Sequence[int], work: Callable[[], None]) -> None:
        with self.lock:
            clock = self.compute.enqueue(work)
            self._write(rows, indices, self.compute.number, clock)

    def read(self, rows: torch.Tensor, indices: Sequence[int], work: Callable[[], None]) -> None:
        with self.lock:
            clock = self.compute.enqueue(work)
            self._read(rows, indices, self.compute.number, clock, clock)

    def compute_for(self, seconds: float) -> None:
        """Keep the compute stream busy."""

        def work() -> None:
            self.compute.time_s += seconds

        with self.lock:
            self.compute.enqueue(work)

    def finish(self) -> None:
        """Let everything run, and let the host know it."""
        for stream in list(self._streams):
            stream.record().synchronize()
        self.host_s = math.inf

    # -- running ----------------------------------------------------------------------------

    def run_some(self) -> None:
        """Run a few operations, or none."""
        for _ in range(self._rng.randrange(4)):
            if self.stalled or not self._run_one():
                return

    def run_until(self, event: FakeEvent) -> bool:
        while not event.passed:
            assert self._run_one(), "an event that nothing will ever make happen"
        return True

    def host_learns(self, clock: Clock) -> None:
        merge(self.host_clock, clock)

    def _run_one(self) -> bool:
        ready = [
            stream
            for stream in self._streams
            if stream.queue and all(event.passed for event in stream.queue[0].after)
        ]
        if not ready:
            return False
        stream = self._rng.choice(ready)
        operation = stream.queue.popleft()
        stream.time_s = max([stream.time_s, *(event.time_s for event in operation.after)])
        operation.work()
        return True

    def _carry_out(self, stream: FakeStream, copies: Sequence[RowCopy]) -> None:
        for copy in copies:
            copy.target.numpy()[copy.target_rows] = copy.source.numpy()[copy.source_rows]
            self.copied_rows.append((copy.target.data_ptr(), list(copy.target_rows)))
            stream.time_s += len(copy.target_rows) * copy.source.shape[1] / self._bytes_per_s

    # -- checking ---------------------------------------------------------------------------

    def _read(
        self, rows: torch.Tensor, indices: Sequence[int], stream: int, clock: Clock, known: Clock
    ) -> None:
        for index in indices:
            accesses = self._accesses_of(rows, index)
            if accesses.write is not None and not precedes(*accesses.write, known):
                self.races.append(
                    f"stream {stream} reads row {index} while {accesses.write[0]} writes"
                )
            accesses.reads[stream] = clock[stream]

    def _write(self, rows: torch.Tensor, indices: Sequence[int], stream: int, clock: Clock) -> None:
        for index in indices:
            accesses = self._accesses_of(rows, index)
            if accesses.write is not None and not precedes(*accesses.write, clock):
                self.races.append(
                    f"stream {stream} writes row {index} while {accesses.write[0]} does"
                )
            for reader, count in accesses.reads.items():
                if not precedes(reader, count, clock):
                    self.races.append(f"stream {stream} writes row {index} while {reader} reads")
            accesses.write, accesses.reads = (stream, clock[stream]), {}

    def _accesses_of(self, rows: torch.Tensor, index: int) -> Accesses:
        # By address, for layer groups alias one pool.
        address = rows.data_ptr() + int(index) * rows.stride(0)
        return self._accesses.setdefault(address, Accesses())
