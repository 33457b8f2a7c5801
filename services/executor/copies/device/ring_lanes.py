"""Lanes between the pool and pageable host memory, by way of a ring of pinned buffers.

A thread per direction moves bytes between the ring and the pool of slots. A buffer of a load is
free again when its device copy has run; a buffer of a save when the thread has emptied it. What is
on a stream depends only on what was put on a stream before, and either direction has a ring of its
own, so that a full ring makes others wait and never for ever.
"""

import threading
from collections import deque

from services.executor.copies.copy_job import (
    Chunk,
    CopyJob,
    between_pool_and_ring,
    between_ring_and_host,
    chunks_of,
)
from services.executor.copies.device.lane import IssuingLane, closed_error
from services.executor.copies.device.queued_loads import QueuedLoads
from services.executor.copies.host.host_ring import HostRing, RingBuffer
from services.executor.copies.streams import Device, Event


class RingLoads(QueuedLoads):
    """Host to pool: the thread fills a buffer and issues its copy, the most urgent chunk first."""

    def __init__(self, device: Device, ring: HostRing) -> None:
        super().__init__(device)
        self._ring = ring
        self.start()

    def settle(self, job: CopyJob, timeout_s: float) -> bool:
        """Blocks while the thread fills buffers: bytes pass through the processor here."""
        return self.wait_until_issued(job, timeout_s)

    def run(self) -> None:
        self.device.attach()
        while True:
            with self.changed:
                if not self.wait_for_work():
                    return
            buffer = self._ring.take()  # before the chunk, which others may still overtake
            with self.changed:
                chunk = self.waiting.pop()
            self._carry(chunk, buffer)

    def _carry(self, chunk: Chunk, buffer: RingBuffer) -> None:
        job, end = chunk.job, None
        try:
            if self.is_wanted(job):
                self._fill(chunk, buffer)
        except Exception as error:  # noqa: BLE001  # told to whoever waits
            job.error = error
        with self.changed:
            if self.is_wanted(job):
                self.stream.wait(job.ready)
                end = self.issue(chunk, between_pool_and_ring(chunk, buffer), source_is_stable=True)
            self._ring.give_back(buffer, after=end)
            job.num_to_issue -= 1
            self.changed.notify_all()

    def _fill(self, chunk: Chunk, buffer: RingBuffer) -> None:
        save = chunk.job.after_save
        if save is not None and save.landed is not None:
            save.landed.wait()
            if save.error is not None:
                raise RuntimeError("the slots were not saved") from save.error
        for copy in between_ring_and_host(chunk, buffer):
            self.device.copy_on_host(copy)


class RingSaves(IssuingLane):
    """Pool to host: chunks are issued into free buffers in order, and the thread empties them."""

    def __init__(self, device: Device, ring: HostRing) -> None:
        super().__init__(device)
        self._ring = ring
        self._waiting: deque[Chunk] = deque()
        self._issued: deque[tuple[Chunk, RingBuffer, Event]] = deque()
        self._thread = threading.Thread(target=self.run, name="kv-d2h", daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        job.landed = threading.Event()
        with self.changed:
            if self.closing:
                self._end(job, closed_error())
                return
            chunks = chunks_of(job)
            job.num_to_issue = job.num_to_land = len(chunks)
            if not chunks:
                job.landed.set()
            self._waiting.extend(chunks)
            self._issue_into_free_buffers()
            self.changed.notify_all()

    def settle(self, job: CopyJob, timeout_s: float) -> bool:
        """Blocks while the ring is full."""
        return self.wait_until_issued(job, timeout_s)

    def close(self) -> bool:
        has_ended = self.stop(self._thread)
        with self.changed:
            self._end_all(closed_error())
        return has_ended

    def _end_all(self, error: Exception) -> None:
        for chunk in [*self._waiting, *(chunk for chunk, _, _ in self._issued)]:
            self._end(chunk.job, error)
        self._waiting.clear()

    def cancel(self, job: CopyJob) -> None:
        with self.changed:
            job.cancelled = True
            num_dropped = sum(chunk.job is job for chunk in self._waiting)
            self._waiting = deque(chunk for chunk in self._waiting if chunk.job is not job)
            job.num_to_issue -= num_dropped
            self._note_landed(job, num_dropped)
            self.changed.notify_all()

    def _end(self, job: CopyJob, error: Exception) -> None:
        job.error = job.error or error
        self._note_landed(job, job.num_to_land)

    def _note_landed(self, job: CopyJob, num_chunks: int) -> None:
        job.num_to_land -= num_chunks
        if job.num_to_land == 0:
            assert job.landed is not None
            job.landed.set()

    def _issue_into_free_buffers(self) -> None:
        while self._waiting and not self.closing:
            buffer = self._ring.try_take()
            if buffer is None:
                return
            chunk = self._waiting.popleft()
            self.stream.wait(chunk.job.ready)
            end = self.issue(chunk, between_pool_and_ring(chunk, buffer), source_is_stable=False)
            chunk.job.num_to_issue -= 1
            self._issued.append((chunk, buffer, end))

    def run(self) -> None:
        """Empty buffers until the lane closes; what goes wrong is the end of all saves."""
        try:
            self._empty_buffers()
        except Exception as error:  # noqa: BLE001  # a load may wait for a save to land
            with self.changed:
                self.closing = True
                self._end_all(error)
                self.changed.notify_all()

    def _empty_buffers(self) -> None:
        self.device.attach()
        while True:
            with self.changed:
                while not self._issued and not self.closing:
                    self.changed.wait()
                if not self._issued:
                    return
                chunk, buffer, end = self._issued[0]
            end.synchronize()
            self._empty(chunk, buffer)
            with self.changed:
                self._issued.popleft()
                self._note_landed(chunk.job, 1)
                self._ring.give_back(buffer)
                self._issue_into_free_buffers()
                self.changed.notify_all()

    def _empty(self, chunk: Chunk, buffer: RingBuffer) -> None:
        job = chunk.job
        try:
            if job.error is None and not job.cancelled:
                for copy in between_ring_and_host(chunk, buffer):
                    self.device.copy_on_host(copy)
        except Exception as error:  # noqa: BLE001  # told to whoever waits
            job.error = error
