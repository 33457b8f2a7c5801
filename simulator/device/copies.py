"""One direction between host and GPU memory, chunk by chunk.

Jobs are served in the order of their priority, first come first served among equals. A chunk that
has begun is finished: a more urgent job waits for it. Chunks of one job that follow each other are
one stretch, computed at once; it is cut behind the chunk under way where anything changes.
"""

import heapq
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

Priority: TypeAlias = tuple[int, ...]  # smaller goes first

ALL_REDUCE = -1  # of the step under way
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
    num_users: int = 1  # that wait for it

    def give_up(self) -> None:
        """Count one user less; without any it is cancelled."""
        self.num_users -= 1
        self.cancelled = self.num_users <= 0


@dataclass(slots=True, kw_only=True)
class LaneCounts:
    """What became of everything submitted, in bytes and seconds; of complete chunks."""

    submitted_bytes: int = 0
    carried_bytes: int = 0
    cancelled_bytes: int = 0
    busy_s: float = 0.0
    num_copies: int = 0


@dataclass(slots=True, kw_only=True)
class Lane:
    """A queue of jobs and the stretch under way. Time only goes forward."""

    bytes_per_s: float  # > 0; `set_rate` changes it
    copy_overhead_s: float = 0.0  # per chunk, >= 0
    chunk_bytes: int = 4 << 20  # >= 1
    now_s: float = 0.0
    counts: LaneCounts = field(default_factory=LaneCounts)
    _queue: list[tuple[Priority, int, CopyJob]] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=count)
    _current: CopyJob | None = None
    _current_number: int = 0
    # The stretch under way, without the chunks of it that are counted already.
    _stretch_bytes: int = 0
    _begun_s: float = 0.0
    _end_s: float = 0.0

    @property
    def num_queued_bytes(self) -> int:
        """Bytes that wait or are under way."""
        waiting = sum(job.num_left_bytes for _, _, job in self._queue if not job.cancelled)
        return waiting + (self._current.num_left_bytes if self._current is not None else 0)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way and nothing waits."""
        return self._current is None and not self._queue

    def set_rate(self, bytes_per_s: float) -> None:
        """Change the rate from the next chunk on."""
        if bytes_per_s != self.bytes_per_s:
            self._cut()
            self.bytes_per_s = bytes_per_s

    def submit(self, job: CopyJob, now_s: float) -> None:
        """Put a job into the queue at `now_s`, up to which the lane has been advanced."""
        assert now_s >= self.now_s
        self.now_s = now_s
        job.num_left_bytes = job.num_bytes
        self.counts.submitted_bytes += job.num_bytes
        if job.num_bytes == 0:
            job.done_s = now_s
            return
        heapq.heappush(self._queue, (job.priority, next(self._numbers), job))
        if self._current is not None and job.priority < self._current.priority:
            self._cut()

    def begin(self, now_s: float) -> float | None:
        """Return when the stretch under way ends, after beginning one at `now_s` if none is.

        None if there is nothing to do.
        """
        if self._current is not None and self._current.cancelled:
            self._cut()
        if self._current is None:
            self._take(now_s)
        return None if self._current is None else self._end_s

    def _take(self, now_s: float) -> None:
        while self._queue:
            _, number, job = heapq.heappop(self._queue)
            if job.cancelled:
                self.counts.cancelled_bytes += job.num_left_bytes
                continue
            self.now_s = max(self.now_s, now_s)
            self._current, self._current_number = job, number
            self._stretch_bytes, self._begun_s = job.num_left_bytes, self.now_s
            self._end_s = self.now_s + self._stretch_s()
            return

    def alone_s(self, num_bytes: int) -> float:
        """Return how long a job takes that waits for no other."""
        num_chunks = -(-num_bytes // self.chunk_bytes)
        return num_chunks * self.copy_overhead_s + num_bytes / self.bytes_per_s

    def _stretch_s(self) -> float:
        return self.alone_s(self._stretch_bytes)

    def finish(self) -> CopyJob:
        """End the stretch under way, and return its job: done if `done_s` is set."""
        job = self._current
        assert job is not None
        self.now_s, self._current = self._end_s, None
        num_chunks = -(-self._stretch_bytes // self.chunk_bytes)
        self._count(job, num_chunks, self._stretch_bytes, self._end_s - self._begun_s)
        if job.num_left_bytes == 0:
            job.done_s = self.now_s
        else:
            heapq.heappush(self._queue, (job.priority, self._current_number, job))
        return job

    def _count(self, job: CopyJob, num_chunks: int, num_bytes: int, seconds: float) -> None:
        job.num_left_bytes -= num_bytes
        counts = self.counts
        counts.carried_bytes += num_bytes
        counts.busy_s += seconds
        counts.num_copies += num_chunks

    def _settle(self) -> None:
        """Count the chunks of the stretch under way that are complete, all but the last one."""
        job, chunk_bytes = self._current, self.chunk_bytes
        if job is None or self._stretch_bytes <= chunk_bytes:
            return
        chunk_s = self.copy_overhead_s + chunk_bytes / self.bytes_per_s
        num_chunks = int((self.now_s - self._begun_s) / chunk_s)
        num_chunks = min(num_chunks, (self._stretch_bytes - 1) // chunk_bytes)
        if num_chunks > 0:
            self._begun_s += num_chunks * chunk_s
            self._stretch_bytes -= num_chunks * chunk_bytes
            self._count(job, num_chunks, num_chunks * chunk_bytes, num_chunks * chunk_s)

    def _cut(self) -> None:
        """End the stretch under way behind its chunk of this moment."""
        self._settle()
        job = self._current
        if job is None:
            return
        if self._begun_s >= self.now_s:  # the chunk would only begin now
            self._current = None
            heapq.heappush(self._queue, (job.priority, self._current_number, job))
        elif self._stretch_bytes > self.chunk_bytes:
            self._stretch_bytes = self.chunk_bytes
            self._end_s = self._begun_s + self._stretch_s()

    def advance(self, until_s: float) -> None:
        """Carry what can be carried up to `until_s`; a chunk that ends later stays under way.

        None begins at `until_s` itself: what is submitted then may be more urgent.
        """
        if self._current is not None and self._current.cancelled:
            self._cut()
        while True:
            if self._current is None and self.now_s < until_s:
                self._take(self.now_s)
            if self._current is None or self._end_s > until_s:
                break
            self.finish()
        self.now_s = max(self.now_s, until_s)
        self._settle()

    def check_integrity(self) -> None:
        """Raise AssertionError if bytes were lost or made."""
        counts = self.counts
        dropped = sum(job.num_left_bytes for _, _, job in self._queue if job.cancelled)
        accounted = counts.carried_bytes + counts.cancelled_bytes + self.num_queued_bytes
        assert accounted + dropped == counts.submitted_bytes
