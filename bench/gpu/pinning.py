"""Pinning: beside the capture of a CUDA graph, below a limit on locked memory, and how fast."""

import contextlib
import resource
import time
from collections.abc import Iterator
from typing import Any

from bench.gpu.machine import Machine
from services.executor.copies.host.host_memory import HostMemory, PinningError, allocate_rows

LOW_LIMIT_BYTES = 64 << 10
ROW_BYTES = 1 << 20


def pinning(machine: Machine, *, num_bytes: int, when: str) -> list[dict[str, Any]]:
    """Capture a graph with all memory pinned "before" it, or by a thread "during" it."""
    memory = HostMemory([ROW_BYTES], num_bytes // ROW_BYTES, registrar=machine.registrar)
    begin_s = time.perf_counter()
    if when == "before":
        _pin(memory)
        pin_s = time.perf_counter() - begin_s
        error = machine.capture()
    else:
        error = machine.capture(lambda: _pin(memory))
        pin_s = time.perf_counter() - begin_s
    begin_s = time.perf_counter()
    memory.close()
    return [
        {
            "when": when,
            "error": error,
            "pinned_share": memory.num_ready_slots / max(1, memory.num_slots),
            "pin_bytes_per_s": num_bytes / pin_s,
            "unpin_bytes_per_s": num_bytes / max(1e-9, time.perf_counter() - begin_s),
        }
    ]


def _pin(memory: HostMemory) -> None:
    memory.pin_first_chunk()
    memory.start_pinning()
    memory.wait_until_pinned()


def memlock(machine: Machine, *, num_bytes: int) -> list[dict[str, Any]]:
    """Pin more than the limit on locked memory allows to a process without rights."""
    rows, error = allocate_rows(num_bytes // ROW_BYTES, ROW_BYTES), ""
    with _memlock_limit(LOW_LIMIT_BYTES):
        if machine.registrar is not None:
            try:
                machine.registrar.register(rows.data_ptr(), rows.numel())
                machine.registrar.unregister(rows.data_ptr())
            except PinningError as refusal:
                error = str(refusal)
    return [{"limit_bytes": LOW_LIMIT_BYTES, "num_bytes": num_bytes, "error": error}]


@contextlib.contextmanager
def _memlock_limit(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    least = num_bytes if before[1] < 0 else min(num_bytes, before[1])
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (least, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
