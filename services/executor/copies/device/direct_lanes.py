"""Lanes between the pool and pinned host memory: a chunk is one batch of copies."""

import heapq
import math
import threading
from collections import deque

from services.executor.copies.copy_job import Chunk, CopyJob, between_pool_and_host, chunks_of
from services.executor.copies.device.lane import IssuingLane, closed_error
from services.executor.copies.streams import Device, Event

MAX_ISSUED_CHUNKS = 4  # enough to keep a link busy; the rest can still be overtaken


class ChunkHeap:
    """Chunks of loads, the most urgent first, those of equal urgency as they came."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Chunk]] = []
        self._num_pushed = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def push(self, job: CopyJob) -> None:
        for chunk in chunks_of(job):
            self._num_pushed += 1
            job.num_to_issue += 1
            heapq.heappush(self._heap, (job.copy.urgency, self._num_pushed, chunk))

    def pop(self) -> Chunk:
        return heapq.heappop(self._heap)[2]

    def pop_run(self) -> tuple[Chunk, int]:
        """Return the next chunk with those of its job that follow it, as one, and their number."""
        first = last = self.pop()
        num_chunks = 1
        while self._heap and self._heap[0][2].job is first.job:
            last = self.pop()
            num_chunks += 1
        return Chunk(first.job, first.start, last.end), num_chunks

    def fail(self, error: Exception) -> None:
        """Empty the heap; what was in it has failed."""
        for _, _, chunk in self._heap:
            chunk.job.error = chunk.job.error or error
        self._heap.clear()


class DirectLoads(IssuingLane):
    """Host to pool. A thread issues a few chunks ahead; whoever waits for a job issues the rest.

    So a late urgent load overtakes restores, and nobody waits on the host for a copy.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._waiting = ChunkHeap()
        self._issued: deque[Event] = deque()
        self._thread = threading.Thread(target=self._run, name="kv-h2d", daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        with self.changed:
            self._waiting.push(job)
            if self.closing:
                self._waiting.fail(closed_error())
            self.changed.notify_all()

    def settle(self, job: CopyJob, timeout_s: float) -> bool:
        with self.changed:
            while job.num_to_issue and self.is_wanted(job):
                self._issue(*self._waiting.pop_run())
        return True

    def close(self) -> bool:
        has_ended = self.stop(self._thread)
        with self.changed:
            self._waiting.fail(closed_error())
        return has_ended

    def _run(self) -> None:
        self.device.attach()
        while True:
            with self.changed:
                while not self._waiting and not self.closing:
                    self.changed.wait()
                if self.closing:
                    return
                if len(self._issued) < MAX_ISSUED_CHUNKS:
                    self._issue(self._waiting.pop(), 1)
                    continue
                oldest = self._issued.popleft()
            oldest.synchronize()

    def _issue(self, chunk: Chunk, num_chunks: int) -> None:
        job = chunk.job
        if self.is_wanted(job):
            self.stream.wait(job.ready)
            save = job.after_save
            is_over = save is None or save.done
            if save is not None and save.end is not None and not is_over:
                self.stream.wait(save.end)
            copies = between_pool_and_host(chunk)
            self._issued.append(self.issue(chunk, copies, source_is_stable=is_over))
        job.num_to_issue -= num_chunks


class DirectSaves(IssuingLane):
    """Pool to host, in the order of submission: nothing overtakes, so all is issued at once."""

    def submit(self, job: CopyJob) -> None:
        with self.changed:
            if self.closing:
                job.error = closed_error()
                return
            if len(job.slots):
                self.stream.wait(job.ready)
                everything = Chunk(job, 0, len(job.slots))
                self.issue(everything, between_pool_and_host(everything), source_is_stable=False)

    def settle(self, job: CopyJob, timeout_s: float) -> bool:
        return True

    def close(self) -> bool:
        return self.stop(None)


def wait_bound_s(timeout_s: float) -> float | None:
    """Return a time to wait as threads take it."""
    return None if math.isinf(timeout_s) else min(timeout_s, threading.TIMEOUT_MAX)
