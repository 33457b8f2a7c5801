"""What a device engine needs of a device: streams that run in order, and events between them.

Calls enqueue work and return. Work of one stream runs in the order of the calls; work of different
streams is ordered by events only, and so is work against the host, which knows that something has
happened only after `query` said so or `synchronize` returned.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from services.executor.copies.copy_engine import Direction

POLL_S = 1e-3

OnFailure = Callable[[Exception], None]
Rows = tuple[torch.Tensor, npt.NDArray[np.int64]]  # a matrix of bytes, and which of its rows


class Event(Protocol):
    """A point of a stream. Made by `Stream.record`."""

    def query(self) -> bool:
        """Whether everything before it has run."""

    def synchronize(self) -> None:
        """Block the calling thread until everything before it has run."""

    def elapsed_s(self, end: "Event") -> float:
        """Return the seconds from here to `end`; both were recorded with timing and have passed."""


class Stream(Protocol):
    def record(self, *, timing: bool = False) -> Event:
        """Return the point after everything enqueued so far."""

    def wait(self, event: Event, timeout_s: float = math.inf) -> bool:
        """Let what is enqueued from now on run after an event.

        Where work runs as it is called, the caller waits, so long at most; return whether the event
        has passed then. Elsewhere the call returns at once, and True.
        """

    def close(self, timeout_s: float) -> bool:
        """Let what has begun end, and drop the rest where the device can: those copies fail.

        Return whether nothing runs any more, after `timeout_s` at most. Nothing may be enqueued
        from now on. Idempotent.
        """


def ends_within(stream: Stream, timeout_s: float) -> bool:
    """Poll until everything enqueued on a stream has run, or the time is over."""
    last, deadline_s = stream.record(), time.monotonic() + timeout_s
    while not last.query() and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return last.query()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCopy:
    """Rows of one matrix of bytes to rows of another, pairwise; rows have the same length."""

    source: torch.Tensor  # [num_rows, row_bytes] uint8
    source_rows: npt.NDArray[np.int64]
    target: torch.Tensor
    target_rows: npt.NDArray[np.int64]


class Layers:
    """Matrices of bytes, and those that rows of them go to: a pair with rows of a length each."""

    def __init__(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        self.pairs = tuple(zip(sources, targets, strict=True))
        # Bytes of a row, and where the rows of either begin.
        self.numbers = [(s.shape[1], s.data_ptr(), t.data_ptr()) for s, t in self.pairs]
        self.row_bytes: int = sum(s.shape[1] for s, _ in self.pairs)  # of all layers


@dataclass(slots=True, eq=False)
class CopyBatch:
    """The same rows of all layers, enqueued together, whole or in parts, perhaps many times."""

    layers: Layers
    source_rows: npt.NDArray[np.int64]
    target_rows: npt.NDArray[np.int64]
    rows_per_part: int = 0  # parts begin at multiples of it, and end there or with the last row
    pinned_rows: npt.NDArray[np.int64] | None = None  # sources or targets that are pinned in ranges
    prepared: Any = None  # what the device has made of it


@dataclass(frozen=True, slots=True)
class Part:
    """Rows `[start, end)` of a batch."""

    batch: CopyBatch
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return (self.end - self.start) * self.batch.layers.row_bytes

    @property
    def is_whole(self) -> bool:
        return self.end - self.start == len(self.batch.source_rows)

    def copies(self) -> list[RowCopy]:
        some = slice(self.start, self.end)
        rows = self.batch.source_rows[some], self.batch.target_rows[some]
        return [
            RowCopy(source=source, source_rows=rows[0], target=target, target_rows=rows[1])
            for source, target in self.batch.layers.pairs
        ]


class Device(Protocol):
    """A device whose copies run beside its layers, and the host beside it."""

    @property
    def max_chunks_ahead(self) -> int:
        """How many chunks on a stream keep the link busy: what is there cannot be overtaken."""

    def attach(self) -> None:
        """Prepare the calling thread, once, for the other calls."""

    def compute_stream(self) -> Stream:
        """Return the stream on which the calling thread runs the model."""

    def new_stream(self, direction: Direction | None = None) -> Stream:
        """Return a stream for bulk copies in a direction; None: for few bytes."""

    def copy(
        self, stream: Stream, part: Part, *, source_is_stable: bool, failed: OnFailure
    ) -> None:
        """Enqueue part of a batch of copies between the device and pinned host memory.

        `source_is_stable` says that the host knows the last write of every source to be over; the
        copy may then read them before its turn. A copy that is refused raises; one that fails
        later calls `failed`, from any thread, before its end passes.
        """

    def fill(self, rows: torch.Tensor, indices: npt.NDArray[np.int64], byte: int) -> None:
        """Fill rows of device memory on the compute stream."""

    def calculate(
        self, work: Callable[[], None], *, reads: Sequence[Rows], writes: Sequence[Rows]
    ) -> None:
        """Enqueue on the compute stream what `work` asks torch for: it reads and writes rows."""
