"""What the copy engine makes of the link, against one plain copy of pinned memory."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from bench.gpu.machine import Machine, elapsed_s
from services.executor.copies.copy_engine import Copy, Direction
from services.executor.copies.device.stream_copy_engine import StreamCopyEngine
from services.executor.copies.host.host_memory import HostMemory
from services.executor.copies.pages import pair_pages

NUM_RUNS = 5  # the best one counts: others are disturbed


def link(
    machine: Machine,
    *,
    page_bytes: Sequence[int],
    copy_bytes: int,
    run_blocks: int = 1,
) -> list[dict[str, Any]]:
    """Copy `copy_bytes` of pages in runs of `run_blocks`, each way alone and both at once."""
    plain = {
        direction: _plain_bytes_per_s(machine, direction, copy_bytes) for direction in Direction
    }
    rows = []
    for size in page_bytes:
        rig = _Rig(machine, size, copy_bytes // size)
        try:
            alone = {d: rig.bytes_per_s([d], run_blocks) for d in Direction}
            both = rig.bytes_per_s(list(Direction), run_blocks)
        finally:
            rig.close()
        rows.append(
            {
                "page_bytes": size,
                "run_blocks": run_blocks,
                **{f"plain_{d.value}_bytes_per_s": plain[d] for d in Direction},
                **{f"{d.value}_bytes_per_s": alone[d] for d in Direction},
                **{f"{d.value}_share": alone[d] / plain[d] for d in Direction},
                "both_bytes_per_s": both,
            }
        )
    return rows


def _plain_bytes_per_s(machine: Machine, direction: Direction, num_bytes: int) -> float:
    host = machine.pinned(num_bytes)
    pool = torch.empty(num_bytes, dtype=torch.uint8, device=machine.device)
    source, target = (host, pool) if direction is Direction.H2D else (pool, host)
    return num_bytes / min(
        elapsed_s(machine, lambda: machine.plain_copy(source, target)) for _ in range(NUM_RUNS)
    )


class _Rig:
    """One layer's pool and slots of the same number, and an engine between them."""

    def __init__(self, machine: Machine, page_bytes: int, num_blocks: int) -> None:
        self._machine, self._num_blocks, self._page_bytes = machine, num_blocks, page_bytes
        pool = torch.zeros((num_blocks, page_bytes), dtype=torch.uint8, device=machine.device)
        self._host = HostMemory([page_bytes], num_blocks, registrar=machine.registrar)
        self._host.pin_first_chunk()
        self._host.start_pinning()
        self._host.wait_until_pinned()
        self._host.slabs[0].fill_(1)  # every page is there
        self._engine = StreamCopyEngine(
            pair_pages([(pool,)], self._host.slabs), machine.copies(self._host.slots_per_range)
        )

    def bytes_per_s(self, directions: Sequence[Direction], run_blocks: int) -> float:
        """Return the rate of the best run, bytes of all directions together."""
        order = _in_runs(self._num_blocks, run_blocks)
        best_s = float("inf")
        for _ in range(NUM_RUNS):
            self._machine.finish()
            best_s = min(best_s, elapsed_s(self._machine, lambda: self._copy(directions, order)))
        return len(directions) * self._num_blocks * self._page_bytes / best_s

    def _copy(self, directions: Sequence[Direction], order: list[int]) -> None:
        copies = [
            Copy(direction=direction, group=0, slots=order, block_ids=range(len(order)))
            for direction in directions
        ]
        for ticket in [self._engine.submit(copy) for copy in copies]:
            self._engine.wait(ticket)
            assert ticket.end is not None
            self._machine.streams.compute_stream().wait(ticket.end)

    def close(self) -> None:
        self._engine.close()
        self._host.close()


def _in_runs(num_blocks: int, run_blocks: int) -> list[int]:
    """Return all blocks, runs of them in a random order."""
    starts = list(range(0, num_blocks, run_blocks))
    random.Random(0).shuffle(starts)
    return [n for s in starts for n in range(s, min(s + run_blocks, num_blocks))]
