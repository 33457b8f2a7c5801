"""Loads: chunks wait in a heap, the most urgent first, and some are issued ahead."""

import heapq
import sys
import threading
from collections import deque

from services.executor.copies.copy_engine import BACKGROUND, Direction
from services.executor.copies.copy_job import Chunk, CopyJob
from services.executor.copies.device.lane import Lane, closed_error
from services.executor.copies.streams import Device, Event


class ChunkHeap:
    """Chunks of loads, the most urgent first, those of equal urgency as they came.

    A load is one entry until its last chunk is taken, so that submitting it costs the same
    whatever its size.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, CopyJob]] = []
        self._num_pushed = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def push(self, job: CopyJob) -> None:
        job.num_to_issue = _num_chunks(job)
        if job.num_to_issue:
            self._num_pushed += 1
            heapq.heappush(self._heap, (job.copy.urgency, self._num_pushed, job))

    def pop(self) -> Chunk:
        job = self._heap[0][2]
        return self._take(job, job.next_block + job.pages.blocks_per_chunk)

    def pop_run(self, max_chunks: int = sys.maxsize) -> tuple[Chunk, int]:
        """Return what is left of the most urgent job, as one, and how many chunks that is."""
        job = self._heap[0][2]
        num_chunks = min(max_chunks, _num_chunks(job))
        return self._take(job, job.next_block + num_chunks * job.pages.blocks_per_chunk), num_chunks

    def _take(self, job: CopyJob, end: int) -> Chunk:
        chunk = Chunk(job, job.next_block, min(end, len(job.slots)))
        job.next_block = chunk.end
        if chunk.end == len(job.slots):
            heapq.heappop(self._heap)
        return chunk

    def fail(self, error: Exception) -> None:
        """Empty the heap; what was in it has failed."""
        for _, _, job in self._heap:
            job.error = job.error or error
        self._heap.clear()


def _num_chunks(job: CopyJob) -> int:
    """Return of how many chunks what is left of a job is."""
    return -(-(len(job.slots) - job.next_block) // job.pages.blocks_per_chunk)


class Loads(Lane):
    """Host to pool. A few chunks are issued ahead; a wait for a job issues the rest of it.

    So a late urgent load overtakes restores, and no thread waits on the host for a copy. A thread
    of the lane's own issues ahead what was not issued with its submission: a load of a few chunks
    never wakes it.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device, Direction.H2D)
        self._waiting = ChunkHeap()
        self._issued: deque[Event] = deque()
        self._thread = threading.Thread(target=self._run, name="kv-h2d", daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        with self.changed:
            self._waiting.push(job)
            if self.closing:
                self._waiting.fail(closed_error())
            if self._waiting:
                self._go_ahead(job)
            if self._waiting:
                self.changed.notify_all()

    def _go_ahead(self, job: CopyJob) -> None:
        """Issue at once what a job's submission may, of what waits."""
        self._drop_passed()
        max_ahead = self.device.max_chunks_ahead
        if job.copy.urgency != BACKGROUND and len(self._issued) < max_ahead:
            self._issue(*self._waiting.pop_run(max_ahead))

    def settle(self, job: CopyJob) -> None:
        with self.changed:
            while job.num_to_issue and self.is_wanted(job):
                self._issue(*self._waiting.pop_run())

    def stop(self) -> None:
        super().stop()
        with self.changed:
            self._waiting.fail(closed_error())

    def close(self) -> bool:
        return super().close() and self.has_ended(self._thread)

    def _run(self) -> None:
        """Issue what waits until the lane closes."""
        self.device.attach()
        while True:
            with self.changed:
                if not self._wait_for_work():
                    return
                self._drop_passed()
                if len(self._issued) < self.device.max_chunks_ahead:
                    self._issue(self._waiting.pop(), 1)
                    continue
                oldest = self._issued.popleft()
            oldest.synchronize()

    def _wait_for_work(self) -> bool:
        """Wait until a chunk waits or the lane closes; return whether it goes on."""
        while not self._waiting and not self.closing:
            self.changed.wait()
        return not self.closing

    def _issue(self, chunk: Chunk, num_chunks: int) -> None:
        job = chunk.job
        if self.is_wanted(job):
            self.stream.wait(job.ready)
            save = job.after_save
            is_over = save is None or save.done
            if save is not None and save.end is not None and not is_over:
                self.stream.wait(save.end)
            self._drop_passed()
            self._issued.append(self.issue(chunk, source_is_stable=is_over))
        job.num_to_issue -= num_chunks

    def _drop_passed(self) -> None:
        while self._issued and self._issued[0].query():
            self._issued.popleft()
