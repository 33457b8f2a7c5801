"""A CPU as a device: layers run as they are called, and copies in threads, over a modelled link.

So every engine on a CPU runs the code that engines on GPUs run, and a laptop shows the overlap and
the stalls of a machine with a real link. The link is modelled conservatively for races: the bytes
of a chunk appear only once their time on the link has passed, chunk by chunk.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from services.executor.copies.copy_engine import FOR_EVER, Direction
from services.executor.copies.streams import Event, OnFailure, Part, Rows, Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """One direction of the link between host and pool."""

    bytes_per_s: float | None = None  # > 0; None: as fast as memory is
    latency_s: float = 0.0  # per chunk, >= 0

    def transfer_s(self, num_bytes: int) -> float:
        return self.latency_s + (num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)


MEMORY_SPEED = LinkModel()


@dataclass(slots=True, eq=False)
class CpuEvent:
    """A point of a stream that has passed, at a time of `time.perf_counter()`."""

    time_s: float

    def query(self) -> bool:
        return True

    def passes_within(self, timeout_s: float) -> bool:
        return True

    def synchronize(self) -> None:
        self.passes_within(FOR_EVER)

    def elapsed_s(self, end: Event) -> float:
        assert isinstance(end, CpuEvent)
        return end.time_s - self.time_s


class LinkEvent(CpuEvent):
    """A point of a link's stream. Its time is the link's own, once it has passed."""

    __slots__ = ("_passed",)

    def __init__(self) -> None:
        super().__init__(0.0)
        self._passed = threading.Event()

    def query(self) -> bool:
        return self._passed.is_set()

    def passes_within(self, timeout_s: float) -> bool:
        return self._passed.wait(min(timeout_s, threading.TIMEOUT_MAX))

    def happen(self, time_s: float) -> None:
        self.time_s = time_s
        self._passed.set()


class HostStream:
    """Work of the calling thread: it is over when the call returns, and a wait blocks."""

    def record(self, *, timing: bool = False) -> CpuEvent:
        return CpuEvent(time.perf_counter())

    def wait(self, event: Event, timeout_s: float = FOR_EVER) -> bool:
        assert isinstance(event, CpuEvent)
        return event.passes_within(timeout_s)

    def copy(self, part: Part, failed: OnFailure) -> None:
        move(part)

    def close(self, timeout_s: float) -> bool:
        return True


class LinkStream:
    """One direction of the link: a thread that waits a chunk's time, and copies it."""

    def __init__(self, name: str, link: Callable[[], LinkModel]) -> None:
        """`link` is asked before each chunk."""
        self._link = link
        self._free_s = 0.0  # when the link ends what it has been given
        self._operations: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kv-link-{name}", daemon=True)
        self._thread.start()

    def record(self, *, timing: bool = False) -> LinkEvent:
        event = LinkEvent()
        self._operations.put(lambda: event.happen(self._free_s))
        return event

    def wait(self, event: Event, timeout_s: float = FOR_EVER) -> bool:
        self._operations.put(partial(self._await, event))
        return True

    def copy(self, part: Part, failed: OnFailure) -> None:
        self._operations.put(partial(self._carry_all, part, failed))

    def close(self, timeout_s: float) -> bool:
        self._closing.set()
        self._operations.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        for operation in iter(self._operations.get, None):
            operation()

    def _await(self, event: Event) -> None:
        """The link's own clock: a late wake-up of a thread must not slow the link down."""
        assert isinstance(event, CpuEvent)
        event.synchronize()
        self._free_s = max(self._free_s, event.time_s)

    def _carry_all(self, part: Part, failed: OnFailure) -> None:
        try:
            for chunk in chunks_of(part):
                self._carry(chunk)
        except Exception as error:  # noqa: BLE001  # told to whoever waits
            failed(error)

    def _carry(self, chunk: Part) -> None:
        link = self._link()
        self._free_s += link.transfer_s(chunk.num_bytes)
        self._pass_time()
        if self._closing.is_set():
            raise RuntimeError("the device was closed")
        move(chunk)
        if link.bytes_per_s is None:
            self._free_s = max(self._free_s, time.perf_counter())

    def _pass_time(self) -> None:
        """Wait until the link has carried what it was given."""
        self._closing.wait(max(0.0, self._free_s - time.perf_counter()))


def chunks_of(part: Part) -> Iterator[Part]:
    """Cut a part of a batch where its chunks end."""
    size = part.batch.rows_per_part or part.end
    for start in range(part.start, part.end, size):
        yield Part(part.batch, start, min(start + size, part.end))


def move(part: Part) -> None:
    """Copy the rows of a part, now. NumPy moves whole rows; torch's indexing takes ten times."""
    for copy in part.copies():
        copy.target.numpy()[copy.target_rows] = copy.source.numpy()[copy.source_rows]


class CpuDevice:
    """`Device` on host memory only."""

    max_chunks_ahead = 1  # the link's thread is there at once: nothing need wait on its stream

    def __init__(self, *, h2d: LinkModel = MEMORY_SPEED, d2h: LinkModel = MEMORY_SPEED) -> None:
        self.links = {Direction.H2D: h2d, Direction.D2H: d2h}  # may be given others at any time
        self._compute = HostStream()

    def attach(self) -> None:
        pass

    def compute_stream(self) -> HostStream:
        return self._compute

    def new_stream(self, direction: Direction | None = None) -> Stream:
        if direction is None:
            return HostStream()
        return LinkStream(direction.value, lambda: self.links[direction])

    def copy(
        self, stream: Stream, part: Part, *, source_is_stable: bool, failed: OnFailure
    ) -> None:
        assert isinstance(stream, HostStream | LinkStream)
        stream.copy(part, failed)

    def fill(self, rows: torch.Tensor, indices: npt.NDArray[np.int64], byte: int) -> None:
        rows.numpy()[indices] = byte

    def calculate(
        self, work: Callable[[], None], *, reads: Sequence[Rows], writes: Sequence[Rows]
    ) -> None:
        work()
