"""Lanes between the pool and pinned host memory: a chunk is one batch of copies."""

from collections import deque

from services.executor.copies.copy_engine import BACKGROUND
from services.executor.copies.copy_job import Chunk, CopyJob
from services.executor.copies.device.lane import IssuingLane, closed_error
from services.executor.copies.device.queued_loads import QueuedLoads
from services.executor.copies.streams import Device, Event, Part

MAX_ISSUED_CHUNKS = 4  # enough to keep a link busy; the rest can still be overtaken


class DirectLoads(QueuedLoads):
    """Host to pool. A few chunks are issued ahead; whoever waits for a job issues the rest.

    So a late urgent load overtakes restores, and nobody waits on the host for a copy. The thread
    issues ahead what was not issued with its submission: a load of a few chunks never wakes it.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._issued: deque[Event] = deque()
        self.start()

    def go_ahead(self, job: CopyJob) -> None:
        self._drop_passed()
        if job.copy.urgency != BACKGROUND and len(self._issued) < MAX_ISSUED_CHUNKS:
            self._issue(*self.waiting.pop_run(MAX_ISSUED_CHUNKS))

    def settle(self, job: CopyJob, timeout_s: float) -> bool:
        with self.changed:
            while job.num_to_issue and self.is_wanted(job):
                self._issue(*self.waiting.pop_run())
        return True

    def run(self) -> None:
        self.device.attach()
        while True:
            with self.changed:
                if not self.wait_for_work():
                    return
                self._drop_passed()
                if len(self._issued) < MAX_ISSUED_CHUNKS:
                    self._issue(self.waiting.pop(), 1)
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
            self._drop_passed()
            part = Part(job.batch, chunk.start, chunk.end)
            self._issued.append(self.issue(chunk, part, source_is_stable=is_over))
        job.num_to_issue -= num_chunks

    def _drop_passed(self) -> None:
        while self._issued and self._issued[0].query():
            self._issued.popleft()


class DirectSaves(IssuingLane):
    """Pool to host, in the order of submission: nothing overtakes, so all is issued at once."""

    def submit(self, job: CopyJob) -> None:
        with self.changed:
            if self.closing:
                job.error = closed_error()
                return
            if len(job.slots):
                self.stream.wait(job.ready)
                num_blocks = len(job.slots)
                part = Part(job.batch, 0, num_blocks)
                self.issue(Chunk(job, 0, num_blocks), part, source_is_stable=False)

    def settle(self, job: CopyJob, timeout_s: float) -> bool:
        return True

    def close(self) -> bool:
        return self.stop(None)
