"""Host memory for KV: slabs of slots, pinned little by little while the engine already serves.

Pinning locks memory pages so that a device can read and write them by itself. It takes seconds per
ten gigabytes, the driver holds locks meanwhile that other processes of the machine wait for, and
while CUDA graphs are captured no thread of the process may pin. So a first chunk is pinned before,
the others by a background thread afterwards, and only slots that are pinned may be used. At the end
they are given back chunk by chunk in this process: a process that is killed with much pinned memory
hangs in the kernel.
"""

import contextlib
import math
import mmap
import os
import resource
import sys
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import structlog
import torch

from services.executor.copies.host.memory_node import prefer_node

log = structlog.get_logger()

MIN_PIN_CHUNK_BYTES = 16 << 20
MAX_PIN_CHUNK_BYTES = 512 << 20
NUM_PIN_CHUNKS = 64  # aimed at: the first slots are ready long before the last
OS_PAGE_BYTES = mmap.PAGESIZE


class PinningError(Exception):
    """The driver refused to pin memory."""


class Registrar(Protocol):
    """Pins and unpins host memory for a device. Addresses and sizes are whole OS pages."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin a range. Raises PinningError."""

    def unregister(self, address: int) -> None:
        """Unpin a range that was registered at this address. Never raises."""


class PacedRegistrar:
    """Takes the time of pinning on a machine where nothing has to be pinned."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s

    def register(self, address: int, num_bytes: int) -> None:
        time.sleep(num_bytes / self._bytes_per_s)

    def unregister(self, address: int) -> None:
        pass


class HostMemory:
    """Slabs with one row per slot, one slab for each layer of a group: `[num_slots, page_bytes]`.

    Without a registrar nothing needs to be pinned, and every slot is ready at once.
    """

    def __init__(
        self,
        page_bytes: Sequence[int],
        num_slots: int,
        *,
        registrar: Registrar | None = None,
        node: int | None = None,
    ) -> None:
        """`node`: of the machine's memory, near the device; None: any."""
        self.slabs = allocate_slabs(page_bytes, num_slots, node)
        self.num_slots = num_slots = min((len(slab) for slab in self.slabs), default=0)
        self.num_ready_slots = num_slots if registrar is None else 0  # the first ones
        self._registrar = registrar
        self.slots_per_range = _slots_per_range(page_bytes, num_slots)  # pinned as one
        self._registered: list[int] = []  # addresses
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def pin_first_chunk(self) -> None:
        """Pin the first slots now. Does nothing where slots are ready."""
        if not self.num_ready_slots:
            self._pin(max_chunks=1)

    def start_pinning(self) -> None:
        """Pin what is left in the background. No CUDA graph may be captured from now on."""
        if self.num_ready_slots < self.num_slots:
            self._thread = threading.Thread(target=self._pin, name="kv-pin", daemon=True)
            self._thread.start()

    def wait_until_pinned(self) -> None:
        """Return when every slot is ready, or the pinning that was started has given up."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Unpin everything. Returns within the time of two chunks per chunk pinned. Idempotent."""
        self._stopping.set()
        self.wait_until_pinned()
        begin_s, num_chunks = time.monotonic(), len(self._registered)
        while self._registered:
            assert self._registrar is not None
            self._registrar.unregister(self._registered.pop())
        if num_chunks:
            log.info(
                "host_memory_unpinned",
                num_ranges=num_chunks,
                duration_s=round(time.monotonic() - begin_s, 3),
            )

    def _pin(self, max_chunks: int = sys.maxsize) -> None:
        begin_s = time.monotonic()
        try:
            while max_chunks and self.num_ready_slots < self.num_slots:
                if self._stopping.is_set():
                    break
                end = min(self.num_ready_slots + self.slots_per_range, self.num_slots)
                self._pin_slots(self.num_ready_slots, end)
                self.num_ready_slots = end
                max_chunks -= 1
        except PinningError as error:
            log.error(
                "host_memory_pinning_failed",
                num_pinned_slots=self.num_ready_slots,
                num_slots=self.num_slots,
                reason=str(error),
                memlock_limit_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
                effect="serving goes on with the slots that are pinned",
            )
            return
        log.info(
            "host_memory_pinned",
            num_slots=self.num_ready_slots,
            bytes=self.num_ready_slots * sum(slab.shape[1] for slab in self.slabs),
            duration_s=round(time.monotonic() - begin_s, 3),
        )

    def _pin_slots(self, begin: int, end: int) -> None:
        assert self._registrar is not None
        for slab in self.slabs:
            rows = slab[begin:end]
            if rows.numel() == 0:
                continue
            # Faulting pages in here keeps the driver's locks short.
            rows.view(-1).numpy()[::OS_PAGE_BYTES] = 0
            self._registrar.register(rows.data_ptr(), rows.numel())
            self._registered.append(rows.data_ptr())


def allocate_slabs(
    page_bytes: Sequence[int], num_slots: int, node: int | None = None
) -> tuple[torch.Tensor, ...]:
    """Return a slab of `num_slots` rows per page size; fewer rows if memory is refused."""
    num_rows = num_slots
    while True:
        try:
            slabs = tuple(allocate_rows(num_rows, size, node) for size in page_bytes)
        except (OSError, MemoryError) as error:
            num_rows //= 2
            reason = str(error)
            continue
        if num_rows < num_slots:
            log.error(
                "host_memory_refused",
                num_slots=num_rows,
                num_slots_wanted=num_slots,
                reason=reason,
                effect="serving goes on with fewer slots",
            )
        return slabs


def allocate_rows(num_rows: int, row_bytes: int, node: int | None = None) -> torch.Tensor:
    """Return `[num_rows, row_bytes]` uint8 that begins on an OS page.

    Pages are touched when they are first written, so that a slab that is never filled costs
    address space only. They are huge where the kernel has such: pinning walks them one by one. They
    are on a node of the machine's memory, as long as it has some, whichever thread touches them.
    """
    if num_rows * row_bytes == 0:
        return torch.empty((num_rows, row_bytes), dtype=torch.uint8)
    pages = mmap.mmap(-1, num_rows * row_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    rows = torch.frombuffer(pages, dtype=torch.uint8).view(num_rows, row_bytes)
    if node is not None and (error := prefer_node(rows.data_ptr(), rows.numel(), node)):
        log.warning("host_memory_on_any_node", node=node, reason=os.strerror(error))
    return rows


def _slots_per_range(page_bytes: Sequence[int], num_slots: int) -> int:
    """Return how many slots to pin at a time: chunks of every slab are whole OS pages.

    Two pinned ranges must not share an OS page, and no copy may cross from one range to another.
    """
    step = 1
    for size in page_bytes:
        step = math.lcm(step, OS_PAGE_BYTES // math.gcd(OS_PAGE_BYTES, max(1, size)))
    slot_bytes = max(1, sum(page_bytes))
    aimed_bytes = num_slots * slot_bytes // NUM_PIN_CHUNKS
    chunk_bytes = min(MAX_PIN_CHUNK_BYTES, max(MIN_PIN_CHUNK_BYTES, aimed_bytes))
    return max(step, chunk_bytes // slot_bytes // step * step)
