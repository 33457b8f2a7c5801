"""One direction between host and GPU memory, chunk by chunk.

Jobs are served in the order of their priority, first come first served among equals. A chunk that
has begun is finished: a more urgent job waits for it.
"""

import heapq
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

Priority: TypeAlias = tuple[int, ...]  # smaller goes first

LOAD = 0  # to the GPU: what a step waits for
RESTORE = 1  # layers that come back: after everything a step waits for


@dataclass(slots=True, kw_only=True, eq=False)
class CopyJob:
    """Bytes to move as one piece of work."""

    num_bytes: int  # >= 0
    priority: Priority = ()
    num_left_bytes: int = -1  # not yet carried; set by the lane
    done_s: float | None = None
    cancelled: bool = False  # what has not begun is not carried


@dataclass(slots=True, kw_only=True)
class LaneCounts:
    """What became of everything submitted, in bytes and seconds."""

    submitted_bytes: int = 0
    carried_bytes: int = 0
    cancelled_bytes: int = 0
    busy_s: float = 0.0
    num_copies: int = 0


@dataclass(slots=True, kw_only=True)
class Lane:
    """A queue of jobs and the chunk under way. Time only goes forward."""

    bytes_per_s: float  # > 0; may change between chunks
    copy_overhead_s: float = 0.0  # per chunk, >= 0
    chunk_bytes: int = 4 << 20  # >= 1
    now_s: float = 0.0
    counts: LaneCounts = field(default_factory=LaneCounts)
    _queue: list[tuple[Priority, int, CopyJob]] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=count)
    _current: CopyJob | None = None
    _current_bytes: int = 0
    _current_number: int = 0
    _current_end_s: float = 0.0

    @property
    def num_queued_bytes(self) -> int:
        """Bytes that wait or are under way."""
        waiting = sum(job.num_left_bytes for _, _, job in self._queue if not job.cancelled)
        return waiting + (self._current.num_left_bytes if self._current is not None else 0)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way and nothing waits."""
        return self._current is None and not self._queue

    def submit(self, job: CopyJob, now_s: float) -> None:
        """Put a job into the queue at `now_s`, up to which the lane has been advanced."""
        assert now_s >= self.now_s
        if self._current is None:
            self.now_s = now_s
        job.num_left_bytes = job.num_bytes
        self.counts.submitted_bytes += job.num_bytes
        if job.num_bytes == 0:
            job.done_s = now_s
            return
        heapq.heappush(self._queue, (job.priority, next(self._numbers), job))

    def begin(self, now_s: float) -> float | None:
        """Return when the chunk under way ends, after beginning one at `now_s` if none is.

        None if there is nothing to do.
        """
        if self._current is None:
            self._take(now_s)
        return None if self._current is None else self._current_end_s

    def _take(self, now_s: float) -> None:
        while self._queue:
            _, number, job = heapq.heappop(self._queue)
            if job.cancelled:
                self.counts.cancelled_bytes += job.num_left_bytes
                continue
            self.now_s = max(self.now_s, now_s)
            self._current, self._current_number = job, number
            self._current_bytes = min(job.num_left_bytes, self.chunk_bytes)
            seconds = self.copy_overhead_s + self._current_bytes / self.bytes_per_s
            self._current_end_s = self.now_s + seconds
            self.counts.busy_s += seconds
            self.counts.num_copies += 1
            return

    def finish(self) -> CopyJob:
        """End the chunk under way, and return its job: done if `done_s` is set."""
        job = self._current
        assert job is not None
        self.now_s, self._current = self._current_end_s, None
        job.num_left_bytes -= self._current_bytes
        self.counts.carried_bytes += self._current_bytes
        if job.num_left_bytes == 0:
            job.done_s = self.now_s
        else:
            heapq.heappush(self._queue, (job.priority, self._current_number, job))
        return job

    def advance(self, until_s: float) -> None:
        """Carry what can be carried up to `until_s`; a chunk that ends later stays under way.

        None begins at `until_s` itself: what is submitted then may be more urgent.
        """
        while True:
            if self._current is None and self.now_s < until_s:
                self._take(self.now_s)
            if self._current is None or self._current_end_s > until_s:
                break
            self.finish()
        if self._current is None:
            self.now_s = max(self.now_s, until_s)

    def next_end_s(self) -> float | None:
        """Return when the chunk under way ends; None if the lane is idle."""
        return None if self._current is None else self._current_end_s

    def check_integrity(self) -> None:
        """Raise AssertionError if bytes were lost or made."""
        counts = self.counts
        dropped = sum(job.num_left_bytes for _, _, job in self._queue if job.cancelled)
        accounted = counts.carried_bytes + counts.cancelled_bytes + self.num_queued_bytes
        assert accounted + dropped == counts.submitted_bytes
