"""What the copy engine makes of the link, against one plain copy of pinned memory."""

import time
from typing import Any

import torch

from services.executor.copies.backend import make_rings
from services.executor.copies.copy_engine import Copy, Direction
from services.executor.copies.device.cuda_copy_engine import CudaCopyEngine
from services.executor.copies.device.cuda_device import CudaDevice, CudaRegistrar
from services.executor.copies.host_memory import HostMemory
from services.executor.copies.pages import pair_pages
from services.executor.kv_options import HostMemoryForm, KVOptions

PAGE_BYTES = (32 << 10, 64 << 10, 128 << 10, 512 << 10)
COPY_BYTES = 1 << 30
NUM_RUNS = 5  # the best one counts: others are disturbed


def run() -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    plain = {direction: plain_bytes_per_s(device, direction) for direction in Direction}
    rows = []
    for page_bytes in PAGE_BYTES:
        for form in HostMemoryForm:
            measured = engine_bytes_per_s(device, page_bytes, form)
            rows.extend(
                {
                    "page_bytes": page_bytes,
                    "host_memory": form.value,
                    "direction": direction.value,
                    "plain_bytes_per_s": plain[direction],
                    "engine_bytes_per_s": measured[direction],
                    "link_share": measured[direction] / plain[direction],
                }
                for direction in Direction
            )
    return {"gpu": torch.cuda.get_device_name(device), "rows": rows}


def plain_bytes_per_s(device: torch.device, direction: Direction) -> float:
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    pool = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    source, target = (host, pool) if direction is Direction.H2D else (pool, host)
    best_s = float("inf")
    for _ in range(NUM_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        best_s = min(best_s, begin.elapsed_time(end) * 1e-3)
    return COPY_BYTES / best_s


def engine_bytes_per_s(
    device: torch.device, page_bytes: int, form: HostMemoryForm
) -> dict[Direction, float]:
    """Copy scattered blocks of one layer; return the rate of the best run, by direction."""
    num_blocks = COPY_BYTES // page_bytes
    pool = torch.empty((num_blocks, page_bytes), dtype=torch.uint8, device=device)
    registrar = CudaRegistrar(device)
    is_ring = form is HostMemoryForm.RING
    host = HostMemory([page_bytes], num_blocks, registrar=None if is_ring else registrar)
    rings = make_rings(KVOptions(), [page_bytes], registrar) if is_ring else {}
    host.start_pinning()
    host.wait_until_pinned()
    host.slabs[0].fill_(1)  # every page is there
    pages = pair_pages([(pool,)], host.slabs)
    engine = CudaCopyEngine(pages, CudaDevice(device), rings=rings)
    scattered = torch.randperm(num_blocks).tolist()
    rates = {}
    for direction in Direction:
        copy = Copy(
            direction=direction, group=0, slots=scattered, block_ids=list(range(num_blocks))
        )
        best_s = float("inf")
        for _ in range(NUM_RUNS):
            torch.cuda.synchronize()
            begin_s = time.perf_counter()
            ticket = engine.submit(copy)
            engine.wait(ticket)
            torch.cuda.synchronize()
            if is_ring and direction is Direction.D2H:
                ticket.landed.wait()
            best_s = min(best_s, time.perf_counter() - begin_s)
        rates[direction] = num_blocks * page_bytes / best_s
    engine.close()
    for ring in rings.values():
        ring.close()
    host.close()
    return rates
