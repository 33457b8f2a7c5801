"""One direction of a device engine: what it has been given, and what of it is on its stream."""

import threading
from collections import deque

import structlog

from services.executor.copies.copy_engine import Direction
from services.executor.copies.copy_job import Chunk, CopyJob
from services.executor.copies.streams import Device, Event, Part

log = structlog.get_logger()

CLOSE_TIMEOUT_S = 5.0  # for what is under way to end; what hangs is left behind


class Lane:
    """Decides when the chunks of its jobs are issued, each one batch of copies.

    Counts of jobs, and the stream, are touched under `changed`.
    """

    def __init__(self, device: Device, direction: Direction) -> None:
        self.device = device
        self.stream = device.new_stream(direction)
        self.changed = threading.Condition()
        self.closing = False
        self._timed: deque[tuple[Event, Event, int]] = deque()

    def submit(self, job: CopyJob) -> None:
        """Take a job in. Never blocks; what goes wrong is noted in the job."""
        raise NotImplementedError

    def settle(self, job: CopyJob) -> None:
        """Put all of a job on the stream that is wanted. Never blocks."""

    def cancel(self, job: CopyJob) -> None:
        """Issue nothing more of a job."""
        with self.changed:
            job.cancelled = True
            self.changed.notify_all()

    def take_busy(self) -> tuple[int, float]:
        """Return the bytes copied, and the seconds that took, not returned before."""
        num_bytes, busy_s = 0, 0.0
        while self._timed and self._timed[0][1].query():
            begin, end, size = self._timed.popleft()
            num_bytes += size
            busy_s += begin.elapsed_s(end)
        return num_bytes, busy_s

    def stop(self) -> None:
        """Issue nothing more; what is not issued fails. Idempotent."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def close(self) -> bool:
        """Let what is under way end, after `stop`; return whether it did. Idempotent."""
        has_ended = self.stream.close(CLOSE_TIMEOUT_S)
        if not has_ended:
            log.warning("copies_left_behind", effect="their host memory stays pinned")
        return has_ended

    def has_ended(self, thread: threading.Thread) -> bool:
        """Wait for a thread of the lane's own, and return whether it has ended."""
        thread.join(CLOSE_TIMEOUT_S)
        return not thread.is_alive()

    def issue(self, chunk: Chunk, *, source_is_stable: bool) -> Event:
        """Enqueue a chunk and return its end. A failure is the job's; others go on."""
        job = chunk.job
        begin = self.stream.record(timing=True)
        part = Part(job.batch, chunk.start, chunk.end)
        try:
            self.device.copy(self.stream, part, source_is_stable=source_is_stable, failed=job.fail)
        except Exception as error:  # noqa: BLE001  # told to whoever waits
            job.fail(error)
            job.end = end = self.stream.record()
        else:
            job.end = end = self.stream.record(timing=True)
            self._timed.append((begin, end, chunk.num_bytes))
        return end

    def is_wanted(self, job: CopyJob) -> bool:
        return not (job.cancelled or job.error is not None or self.closing)


class Saves(Lane):
    """Pool to host, in the order of submission: nothing overtakes, so all is issued at once."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, Direction.D2H)

    def submit(self, job: CopyJob) -> None:
        with self.changed:
            if self.closing:
                job.error = closed_error()
                return
            if len(job.slots):
                self.stream.wait(job.ready)
                self.issue(Chunk(job, 0, len(job.slots)), source_is_stable=False)


def closed_error() -> Exception:
    return RuntimeError("the copy engine was closed")
