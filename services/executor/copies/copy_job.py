"""One copy of a device engine, from its submission until nothing of it can touch memory."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.executor.copies.copy_engine import Copy, Direction
from services.executor.copies.pages import GroupPages
from services.executor.copies.streams import CopyBatch, Event

Indices = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class CopyJob:
    """A ticket. Its counts change under the lock of its lane."""

    copy: Copy
    slots: Indices
    block_ids: Indices
    pages: GroupPages
    ready: Event  # on the compute stream: the model's last use of what it reads or overwrites
    batch: CopyBatch  # between the pool and the host; of a copy that is made again, the same
    after_save: "CopyJob | None" = None  # must be over before this load
    num_to_issue: int = 0  # chunks
    next_block: int = 0  # of a load: the first that is in no chunk yet
    end: Event | None = None  # of the last chunk issued
    error: Exception | None = None
    cancelled: bool = False

    @property
    def done(self) -> bool:
        if self.num_to_issue and not self.cancelled and self.error is None:
            return False
        return self.end is None or self.end.query()

    def fail(self, error: Exception) -> None:
        """Take in, from any thread, that something of it failed; the first error stays."""
        self.error = self.error or error

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


def between_pool_and_host(
    direction: Direction, pages: GroupPages, slots: Indices, block_ids: Indices
) -> CopyBatch:
    """Return the copies between pool blocks and host slots, in parts of chunks."""
    if direction is Direction.H2D:
        return CopyBatch(pages.to_pool, slots, block_ids, pages.blocks_per_chunk, slots)
    return CopyBatch(pages.to_host, block_ids, slots, pages.blocks_per_chunk, slots)
