"""Copies by two threads, over a link whose speed and latency can be set.

So a laptop shows the overlap and the stalls of a machine with a real link. The link is modelled
conservatively for races: with poisoning on, the target of a load is NaN from its submission; its
bytes appear only once their time on the link has passed, chunk by chunk.
"""

import heapq
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import structlog

from services.executor.copies.copy_engine import (
    FOR_EVER,
    Copy,
    CopyFailedError,
    CopyHungError,
    Direction,
    TransferTotals,
)
from services.executor.copies.pages import GroupPages, fill

log = structlog.get_logger()

CLOSE_TIMEOUT_S = 5.0  # for a copying thread to end; one that hangs is left behind


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """One direction of the link between host and pool."""

    bytes_per_s: float | None = None  # > 0; None: as fast as memory is
    latency_s: float = 0.0  # per chunk, >= 0

    def transfer_s(self, num_bytes: int) -> float:
        return self.latency_s + (num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)


@dataclass(slots=True, eq=False)
class CpuTicket:
    waits_for_layers: ClassVar[bool] = False
    copy: Copy
    num_chunks_left: int
    submitted_s: float
    cancelled: bool = False
    error: Exception | None = None
    event: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> bool:
        return self.event.is_set()


class _Queue:
    """One direction: a thread that takes the most urgent chunk, waits its time, and copies it."""

    def __init__(self, direction: Direction, pages: Sequence[GroupPages], link: LinkModel) -> None:
        self.num_bytes = 0
        self.busy_s = 0.0
        self._direction = direction
        self._pages = pages
        self._link = link
        self._free_s = 0.0  # when the link ends what it has been given
        self._chunks: list[tuple[float, int, CpuTicket, int, int]] = []
        self._num_submitted = 0
        self._closing = threading.Event()
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"kv-{direction.value}", daemon=True)
        self._thread.start()

    def submit(self, copy: Copy) -> CpuTicket:
        chunk = self._pages[copy.group].blocks_per_chunk
        starts = range(0, len(copy.slots), chunk)
        ticket = CpuTicket(copy, len(starts), time.perf_counter())
        if not starts:
            ticket.event.set()
            return ticket
        with self._wake:
            if self._closing.is_set():
                self._drop(ticket)
                return ticket
            for start in starts:
                self._num_submitted += 1
                heapq.heappush(
                    self._chunks,
                    (copy.urgency, self._num_submitted, ticket, start, start + chunk),
                )
            self._wake.notify()
        return ticket

    def close(self) -> None:
        with self._wake:
            self._closing.set()
            self._wake.notify()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("copy_thread_left_behind", direction=self._direction.value)
        with self._wake:
            for _, _, ticket, _, _ in self._chunks:
                self._drop(ticket)
            self._chunks.clear()

    @staticmethod
    def _drop(ticket: CpuTicket) -> None:
        ticket.error = ticket.error or RuntimeError("the copy engine was closed")
        ticket.event.set()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._chunks and not self._closing.is_set():
                    self._wake.wait()
                if self._closing.is_set():
                    return
                _, _, ticket, start, end = heapq.heappop(self._chunks)
            try:
                if not ticket.cancelled and ticket.error is None:
                    self._copy_chunk(ticket, start, end)
            except Exception as error:  # noqa: BLE001  # told to whoever waits
                ticket.error = error
            ticket.num_chunks_left -= 1
            if ticket.num_chunks_left == 0:
                ticket.event.set()

    def _copy_chunk(self, ticket: CpuTicket, start: int, end: int) -> None:
        copy, pages = ticket.copy, self._pages[ticket.copy.group]
        slots, block_ids = list(copy.slots[start:end]), list(copy.block_ids[start:end])
        num_bytes = len(slots) * pages.block_bytes
        # The link's own clock: a late wake-up of this thread must not slow the link down.
        begin_s = max(ticket.submitted_s, self._free_s)
        self._free_s = begin_s + self._link.transfer_s(num_bytes)
        self._pass_time()
        move(pages, self._direction, slots, block_ids)
        if self._link.bytes_per_s is None:
            self._free_s = max(self._free_s, time.perf_counter())
        self.num_bytes += num_bytes
        self.busy_s += self._free_s - begin_s

    def _pass_time(self) -> None:
        """Wait until the link has carried what it was given."""
        self._closing.wait(max(0.0, self._free_s - time.perf_counter()))


def move(
    pages: GroupPages, direction: Direction, slots: Sequence[int], block_ids: Sequence[int]
) -> None:
    """Copy the pages of `slots` to those of `block_ids`, or back."""
    for pool, host in zip(pages.pool, pages.host, strict=True):
        # NumPy moves whole rows; torch's indexing takes ten times as long.
        pool_rows, host_rows = pool.numpy(), host.numpy()
        if direction is Direction.H2D:
            pool_rows[block_ids] = host_rows[slots]
        else:
            host_rows[slots] = pool_rows[block_ids]


class CpuCopyEngine:
    """`CopyEngine` on host memory only."""

    def __init__(
        self,
        pages: Sequence[GroupPages],
        *,
        h2d: LinkModel,
        d2h: LinkModel,
        poison_targets: bool = False,
    ) -> None:
        self._pages = pages
        self._poison_targets = poison_targets
        self._queues = {
            direction: _Queue(direction, pages, link)
            for direction, link in ((Direction.H2D, h2d), (Direction.D2H, d2h))
        }

    def submit(self, copy: Copy) -> CpuTicket:
        if self._poison_targets and copy.direction is Direction.H2D:
            fill(self._pages[copy.group], copy.block_ids, nan=True)
        return self._queues[copy.direction].submit(copy)

    def wait(self, ticket: CpuTicket, timeout_s: float = FOR_EVER) -> float:
        waited_s = 0.0
        if not ticket.done:
            begin_s = time.perf_counter()
            if not ticket.event.wait(min(timeout_s, threading.TIMEOUT_MAX)):
                raise CopyHungError(f"not done after {timeout_s} s")
            waited_s = time.perf_counter() - begin_s
        if ticket.error is not None:
            raise CopyFailedError(str(ticket.error)) from ticket.error
        return waited_s

    def drain(self, ticket: CpuTicket) -> None:
        ticket.event.wait()

    def cancel(self, ticket: CpuTicket) -> None:
        ticket.cancelled = True

    def totals(self) -> TransferTotals:
        h2d, d2h = self._queues[Direction.H2D], self._queues[Direction.D2H]
        return TransferTotals(
            h2d_bytes=h2d.num_bytes,
            d2h_bytes=d2h.num_bytes,
            h2d_busy_s=h2d.busy_s,
            d2h_busy_s=d2h.busy_s,
        )

    def close(self) -> None:
        for queue in self._queues.values():
            queue.close()
