"""One copy of a device engine, from its submission until nothing of it can touch memory."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from services.executor.copies.copy_engine import Copy, Direction
from services.executor.copies.host_ring import RingBuffer
from services.executor.copies.pages import GroupPages
from services.executor.copies.streams import Batch, Event, Part, RowCopy

Indices = npt.NDArray[np.int64]
Rows = tuple[torch.Tensor, Indices]  # a matrix of bytes, and which of its rows


@dataclass(slots=True, eq=False)
class CopyJob:
    """A ticket. Its counts change under the lock of its lane."""

    copy: Copy
    slots: Indices
    block_ids: Indices
    pages: GroupPages
    ready: Event  # on the compute stream: the model's last use of what it reads or overwrites
    batch: Batch  # between the pool and the host; of a copy that is made again, the same
    after_save: "CopyJob | None" = None  # must be over before this load
    num_to_issue: int = 0  # chunks
    next_block: int = 0  # of a load: the first that is in no chunk yet
    num_to_land: int = 0  # chunks not known to be over by a thread of the lane
    end: Event | None = None  # of the last chunk issued
    error: Exception | None = None
    cancelled: bool = False
    landed: threading.Event = field(default_factory=threading.Event)  # saves through a ring

    @property
    def done(self) -> bool:
        if self.num_to_land or (self.num_to_issue and not self.cancelled and self.error is None):
            return False
        return self.end is None or self.end.query()

    @property
    def waits_for_layers(self) -> bool:
        return not self.ready.query()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch `[start, end)` of a job's blocks."""

    job: CopyJob
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return (self.end - self.start) * self.job.pages.block_bytes


def chunks_of(job: CopyJob) -> list[Chunk]:
    """Cut a job into chunks of about 4 MiB."""
    size, num_blocks = job.pages.blocks_per_chunk, len(job.slots)
    return [
        Chunk(job, start, min(start + size, num_blocks)) for start in range(0, num_blocks, size)
    ]


def between_pool_and_host(
    direction: Direction, pages: GroupPages, slots: Indices, block_ids: Indices
) -> Batch:
    """Return the copies between pool blocks and host slots, one per layer, in parts of chunks."""
    host, pool = [(slab, slots) for slab in pages.host], [(rows, block_ids) for rows in pages.pool]
    return Batch(_row_copies(direction, host, pool), pages.blocks_per_chunk)


def between_pool_and_ring(chunk: Chunk, buffer: RingBuffer) -> Part:
    """Return the copies of a chunk between pool blocks and a ring buffer, one per layer."""
    copies = _row_copies(chunk.job.copy.direction, _buffered(chunk, buffer), _blocks(chunk))
    return Part(Batch(copies), 0, chunk.end - chunk.start)


def between_ring_and_host(chunk: Chunk, buffer: RingBuffer) -> list[RowCopy]:
    """Return the copies of a chunk between a ring buffer and host slots, one per layer."""
    return _row_copies(chunk.job.copy.direction, _slots(chunk), _buffered(chunk, buffer))


def _slots(chunk: Chunk) -> list[Rows]:
    rows = chunk.job.slots[chunk.start : chunk.end]
    return [(slab, rows) for slab in chunk.job.pages.host]


def _blocks(chunk: Chunk) -> list[Rows]:
    rows = chunk.job.block_ids[chunk.start : chunk.end]
    return [(pool, rows) for pool in chunk.job.pages.pool]


def _buffered(chunk: Chunk, buffer: RingBuffer) -> list[Rows]:
    rows = np.arange(chunk.end - chunk.start)
    return [(layer, rows) for layer in buffer.rows[: len(chunk.job.pages.pool)]]


def _row_copies(direction: Direction, host: Iterable[Rows], pool: Iterable[Rows]) -> list[RowCopy]:
    """Return the copies from host to pool, or back."""
    sources, targets = (host, pool) if direction is Direction.H2D else (pool, host)
    return [
        RowCopy(source=source, source_rows=source_rows, target=target, target_rows=target_rows)
        for (source, source_rows), (target, target_rows) in zip(sources, targets, strict=True)
    ]
