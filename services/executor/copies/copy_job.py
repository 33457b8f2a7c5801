"""One copy of a device engine, from its submission until nothing of it can touch memory."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.executor.copies.copy_engine import Copy, Direction
from services.executor.copies.host.host_ring import RingBuffer
from services.executor.copies.pages import GroupPages
from services.executor.copies.streams import Batch, Event, Layers, Part, RowCopy

Indices = npt.NDArray[np.int64]
Side = tuple[Sequence[torch.Tensor], Indices]  # matrices of bytes, one per layer, and their rows


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
    landed: threading.Event | None = None  # of a save through a ring: `num_to_land` is 0

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
    """Return the copies between pool blocks and host slots, in parts of chunks."""
    if direction is Direction.H2D:
        return Batch(pages.to_pool, slots, block_ids, pages.blocks_per_chunk, slots)
    return Batch(pages.to_host, block_ids, slots, pages.blocks_per_chunk, slots)


def between_pool_and_ring(chunk: Chunk, buffer: RingBuffer) -> Part:
    """Return the copies of a chunk between pool blocks and a ring buffer."""
    job = chunk.job
    blocks = job.pages.pool, job.block_ids[chunk.start : chunk.end]
    return _part(job.copy.direction, _buffered(chunk, buffer), blocks)


def between_ring_and_host(chunk: Chunk, buffer: RingBuffer) -> list[RowCopy]:
    """Return the copies of a chunk between a ring buffer and host slots, one per layer."""
    job = chunk.job
    slots = job.pages.host, job.slots[chunk.start : chunk.end]
    return _part(job.copy.direction, slots, _buffered(chunk, buffer)).copies()


def _buffered(chunk: Chunk, buffer: RingBuffer) -> Side:
    return buffer.rows[: len(chunk.job.pages.pool)], np.arange(chunk.end - chunk.start)


def _part(direction: Direction, host: Side, pool: Side) -> Part:
    """Return the copies from host to pool, or back."""
    source, target = (host, pool) if direction is Direction.H2D else (pool, host)
    return Part(Batch(Layers(source[0], target[0]), source[1], target[1]), 0, len(source[1]))
