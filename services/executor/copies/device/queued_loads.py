"""What lanes of loads have in common: chunks wait in a heap, and a thread issues them."""

import heapq
import sys
import threading

from services.executor.copies.copy_job import Chunk, CopyJob
from services.executor.copies.device.lane import IssuingLane, closed_error
from services.executor.copies.streams import Device


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


class QueuedLoads(IssuingLane):
    """Host to pool: the most urgent chunk is issued first, by a thread that `start` starts."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.waiting = ChunkHeap()
        self._thread = threading.Thread(target=self.run, name="kv-h2d", daemon=True)

    def start(self) -> None:
        """Start the thread; the last thing that a lane's constructor does."""
        self._thread.start()

    def run(self) -> None:
        """Issue what waits until the lane closes."""
        raise NotImplementedError

    def submit(self, job: CopyJob) -> None:
        with self.changed:
            self.waiting.push(job)
            if self.closing:
                self.waiting.fail(closed_error())
            if self.waiting:
                self.go_ahead(job)
            if self.waiting:
                self.changed.notify_all()

    def go_ahead(self, job: CopyJob) -> None:
        """Issue at once what a job's submission may, of what waits: here nothing."""

    def close(self) -> bool:
        has_ended = self.stop(self._thread)
        with self.changed:
            self.waiting.fail(closed_error())
        return has_ended

    def wait_for_work(self) -> bool:
        """Wait until a chunk waits or the lane closes; return whether it goes on."""
        while not self.waiting and not self.closing:
            self.changed.wait()
        return not self.closing
