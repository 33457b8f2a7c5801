"""Host memory: pinned little by little, given back in chunks."""

import itertools
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.executor.copies.host.host_memory import (
    OS_PAGE_BYTES,
    HostMemory,
    PinningError,
    allocate_rows,
)

PAGE_BYTES = 1 << 16
CHUNK_SLOTS = 256  # of one slab: the least chunk, 16 MiB


@dataclass
class SteppedRegistrar:
    """Pins a range each time it is let; refuses from a number of ranges on."""

    refuses_after: int = 1_000
    ranges: dict[int, int] = field(default_factory=dict)
    most: int = 0
    let: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    asked: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def register(self, address: int, num_bytes: int) -> None:
        self.asked.release()
        assert self.let.acquire(timeout=60)
        if len(self.ranges) >= self.refuses_after:
            raise PinningError("no more")
        for start, size in self.ranges.items():
            assert address + num_bytes <= start or start + size <= address, "pinned twice"
        assert address % OS_PAGE_BYTES == 0
        self.ranges[address] = num_bytes
        self.most = max(self.most, len(self.ranges))

    def unregister(self, address: int) -> None:
        del self.ranges[address]


def test_memory_that_needs_no_pinning_is_ready_at_once() -> None:
    memory = HostMemory([PAGE_BYTES, PAGE_BYTES], 10)

    assert memory.num_ready_slots == 10
    assert [slab.shape for slab in memory.slabs] == [(10, PAGE_BYTES)] * 2
    memory.close()


@pytest.mark.logs("host_memory_pinned")
def test_slots_become_ready_chunk_by_chunk_and_only_when_every_slab_has_them() -> None:
    registrar = SteppedRegistrar()
    memory = HostMemory([PAGE_BYTES // 2] * 2, 2 * CHUNK_SLOTS + 3, registrar=registrar)
    memory.start_pinning()
    seen = []
    for _ in range(6):  # two slabs, two whole chunks and a rest
        assert registrar.asked.acquire(timeout=60)
        seen.append(memory.num_ready_slots)
        registrar.let.release()
    memory.wait_until_pinned()

    assert seen == [0, 0, CHUNK_SLOTS, CHUNK_SLOTS, 2 * CHUNK_SLOTS, 2 * CHUNK_SLOTS]
    assert memory.num_ready_slots == memory.num_slots
    assert sum(registrar.ranges.values()) == memory.num_slots * PAGE_BYTES
    memory.close()
    assert registrar.ranges == {}


def test_nothing_is_pinned_before_it_is_asked_for_and_then_the_first_chunk_at_once() -> None:
    registrar = SteppedRegistrar()
    memory = HostMemory([PAGE_BYTES], 3 * CHUNK_SLOTS, registrar=registrar)
    assert not registrar.asked.acquire(blocking=False)

    registrar.let.release()
    memory.pin_first_chunk()
    memory.pin_first_chunk()

    assert memory.num_ready_slots == CHUNK_SLOTS
    assert len(registrar.ranges) == 1
    memory.close()
    assert registrar.ranges == {}


@pytest.mark.logs("host_memory_unpinned")
def test_closing_while_pinning_stops_after_the_chunk_under_way_and_unpins_it() -> None:
    registrar = SteppedRegistrar()
    memory = HostMemory([PAGE_BYTES], 8 * CHUNK_SLOTS, registrar=registrar)
    memory.start_pinning()
    assert registrar.asked.acquire(timeout=60)
    closing = threading.Thread(target=memory.close)
    closing.start()
    assert memory._stopping.wait(60)

    registrar.let.release()
    closing.join(60)

    assert not closing.is_alive()
    assert registrar.most == 1
    assert registrar.ranges == {}
    memory.close()


@pytest.mark.logs("host_memory_pinning_failed")
def test_when_pinning_is_refused_the_slots_before_it_stay_usable() -> None:
    registrar = SteppedRegistrar(refuses_after=2)
    for _ in range(3):
        registrar.let.release()
    memory = HostMemory([PAGE_BYTES], 8 * CHUNK_SLOTS, registrar=registrar)
    memory.start_pinning()
    memory.wait_until_pinned()

    assert memory.num_ready_slots == 2 * CHUNK_SLOTS
    memory.close()
    assert registrar.ranges == {}


@pytest.mark.parametrize("page_bytes", [[48 << 10], [1 << 20], [1000, 3000], [OS_PAGE_BYTES]])
def test_pinned_ranges_are_whole_os_pages_that_no_two_share(page_bytes: list[int]) -> None:
    registrar = SteppedRegistrar()
    for _ in range(10_000):
        registrar.let.release()
    num_slots = (40 << 20) // sum(page_bytes)
    memory = HostMemory(page_bytes, num_slots, registrar=registrar)
    memory.start_pinning()
    memory.wait_until_pinned()

    assert memory.num_ready_slots == num_slots
    ends = sorted((address, address + size) for address, size in registrar.ranges.items())
    assert len(ends) >= 3 * len(page_bytes) - 2
    for (_, end), (begin, _) in itertools.pairwise(ends):
        assert -(-end // OS_PAGE_BYTES) <= begin // OS_PAGE_BYTES
    memory.close()


def test_memory_is_the_process_own_and_of_huge_pages_where_there_are_any() -> None:
    rows = allocate_rows(1 << 10, 1 << 14)
    flags = flags_of_mapping(rows.data_ptr())

    assert "sh" not in flags  # shared memory has no huge pages
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags


def flags_of_mapping(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that holds an address."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *fields = line.split()
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            is_inside = start <= address < end
        elif is_inside and first == "VmFlags:":
            return fields
    raise AssertionError("no such mapping")


@pytest.mark.logs("host_memory_refused")
def test_memory_that_is_refused_leaves_fewer_slots() -> None:
    memory = HostMemory([1 << 20], 1 << 30)  # 1 PiB: more than a process can address

    assert 0 <= memory.num_slots < 1 << 30
    assert memory.num_ready_slots == memory.num_slots == len(memory.slabs[0])
    memory.close()
