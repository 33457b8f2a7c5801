"""What lanes of loads have in common: chunks wait in a heap, and a thread issues them."""

import heapq
import threading

from services.executor.copies.copy_job import Chunk, CopyJob, chunks_of
from services.executor.copies.device.lane import IssuingLane, closed_error
from services.executor.copies.streams import Device


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
            self.changed.notify_all()

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
