"""Checks on a device that what comes back into the pool is what once left it: a sample of blocks.

All of it is work of the compute stream, where the layers are. The sum of a block is taken when its
copy to the host is submitted, of what layers have written; and again once a load was waited for, of
what layers will read. So a copy that starts too early, a source that is reused too soon and a load
that nobody waits for show, like a byte that changes on the host. Verdicts leave by a stream of
their own and are known a step or two later: no thread waits for them, and no layer.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import structlog
import torch

from services.executor.copies.copy_engine import FOR_EVER, Copy, Direction, TransferTotals
from services.executor.copies.copy_job import CopyJob, Indices
from services.executor.copies.device.cuda_copy_engine import CudaCopyEngine
from services.executor.copies.device.pool_sums import BLOCKS_AT_ONCE, PoolSums
from services.executor.copies.integrity_guard import (
    EVERY_BLOCK,
    SAMPLE_EVERY,
    Checksums,
    identities,
    uids_and_groups,
)
from services.executor.copies.pages import GroupPages
from services.executor.copies.streams import Batch, Device, Event, Layers, Part
from services.executor.kv_options import GuardMode

log = structlog.get_logger()

MAX_OPEN_CHECKS = 4096  # whose verdicts the host has not read; what comes on top is not checked
_UNWATCHED = 0  # identity of a slot without a sum


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """The blocks of a load that have sums."""

    group: int
    slots: Indices
    block_ids: Indices
    identities: Checksums

    def only(self, chosen: "slice | np.ndarray[tuple[int, ...], np.dtype[np.bool_]]") -> "Expected":
        return Expected(
            self.group, self.slots[chosen], self.block_ids[chosen], self.identities[chosen]
        )


@dataclass(frozen=True, slots=True, eq=False)
class OpenCheck:
    """Blocks whose verdicts are on their way: one row of the table of verdicts."""

    row: int
    identities: Checksums


class Verdicts:
    """A byte per checked block, other than 0 if it is wrong: written by the device, read later."""

    def __init__(self, device: Device, where: torch.device) -> None:
        self.table = torch.zeros((MAX_OPEN_CHECKS, BLOCKS_AT_ONCE), dtype=torch.uint8, device=where)
        self._on_host = torch.zeros(
            (MAX_OPEN_CHECKS, BLOCKS_AT_ONCE), dtype=torch.uint8, pin_memory=where.type != "cpu"
        )
        self._device = device
        self._stream = device.new_stream()  # behind no bulk copy of another stream's
        self._free = list(range(MAX_OPEN_CHECKS))
        self._begun: list[OpenCheck] = []
        self._leaving: deque[tuple[Event, list[OpenCheck]]] = deque()

    def begin(self, checked: Checksums) -> int | None:
        """Return the row for the verdicts on some blocks; None if every row is in use."""
        if not self._free:
            return None
        row = self._free.pop()
        self._begun.append(OpenCheck(row, checked))
        return row

    def send(self) -> None:
        """Let what was begun since the last call come to the host."""
        if not self._begun:
            return
        rows = np.array([check.row for check in self._begun])
        self._stream.wait(self._device.compute_stream().record())
        part = Part(Batch(Layers([self.table], [self._on_host]), rows, rows), 0, len(rows))
        self._device.copy(self._stream, part, source_is_stable=False)
        self._leaving.append((self._stream.record(), self._begun))
        self._begun = []

    def take(self) -> list[tuple[Checksums, Checksums]]:
        """Return what has arrived since the last call: blocks, and those of them that are wrong."""
        found = []
        while self._leaving and self._leaving[0][0].query():
            for check in self._leaving.popleft()[1]:
                is_wrong = self._on_host.numpy()[check.row, : len(check.identities)] != 0
                found.append((check.identities, check.identities[is_wrong]))
                self._free.append(check.row)
        return found


class DeviceGuard:
    """A `CopyEngine` over a device's. Waits let everything pass; `take_wrong` tells what was wrong.

    Of `SAMPLE_EVERY` blocks that a layer group saves, one gets a sum; of as many of its loads, one
    has those checked. In `GuardMode.ALL` all of both.
    """

    def __init__(
        self,
        engine: CudaCopyEngine,
        pages: Sequence[GroupPages],
        *,
        num_slots: int,
        mode: GuardMode,
    ) -> None:
        self.engine = engine
        self.num_checked_blocks = 0  # since the start
        self._every = SAMPLE_EVERY if mode is GuardMode.SAMPLE else 1
        self._sums = PoolSums(pages, engine.device, num_slots=num_slots)
        self._verdicts = Verdicts(engine.device, pages[0].pool[0].device)
        # Of each layer group; apart, so that not all are due in one step.
        self._num_saved_blocks, self._num_loads = list(range(len(pages))), list(range(len(pages)))
        self._held = np.full(num_slots, _UNWATCHED, dtype=np.int64)  # identities, by slot
        self._due: dict[CopyJob, Expected] = {}  # submitted and not waited for
        self._wrong: list[int] = []  # identities

    def submit(self, copy: Copy) -> CopyJob:
        if not copy.identities:
            return self.engine.submit(copy)
        if copy.direction is Direction.D2H:
            self._watch(copy)
            return self.engine.submit(copy)
        self._num_loads[copy.group] += 1
        job = self.engine.submit(copy)
        if self._num_loads[copy.group] % self._every == 0:
            self._due[job] = self._expected(job.copy, job.slots, job.block_ids)
        return job

    def check(self, copy: Copy) -> None:
        """See `LateGuard`."""
        self._num_loads[copy.group] += 1
        if self._num_loads[copy.group] % self._every == 0:
            slots = np.asarray(copy.slots, dtype=np.int64)
            block_ids = np.asarray(copy.block_ids, dtype=np.int64)
            self._check(self._expected(copy, slots, block_ids))

    def _watch(self, copy: Copy) -> None:
        """Take the sums of some blocks that are to leave; what their slots held is over."""
        slots = np.asarray(copy.slots, dtype=np.int64)
        self._held[slots] = _UNWATCHED
        first = -self._num_saved_blocks[copy.group] % self._every
        self._num_saved_blocks[copy.group] += len(slots)
        if first < len(slots):
            chosen = slice(first, None, self._every)
            self._held[slots[chosen]] = identities(copy, chosen)
            block_ids = np.asarray(copy.block_ids, dtype=np.int64)[chosen]
            self._sums.note(copy.group, block_ids, slots[chosen])

    def _expected(self, copy: Copy, slots: Indices, block_ids: Indices) -> Expected:
        """Return what has sums; what holds other KV is wrong."""
        held = self._held[slots]
        expected = Expected(copy.group, slots, block_ids, identities(copy, EVERY_BLOCK))
        is_foreign = (held != _UNWATCHED) & (held != expected.identities)
        self._wrong.extend(expected.identities[is_foreign].tolist())
        return expected.only(held == expected.identities)

    def wait(self, ticket: CopyJob, timeout_s: float = FOR_EVER) -> float:
        expected = self._due.pop(ticket, None)
        waited_s = self.engine.wait(ticket, timeout_s)
        if expected is not None:
            # Slots that were saved to since have other sums.
            self._check(expected.only(self._held[expected.slots] == expected.identities))
        return waited_s

    def _check(self, expected: Expected) -> None:
        for start in range(0, len(expected.slots), BLOCKS_AT_ONCE):
            some = expected.only(slice(start, start + BLOCKS_AT_ONCE))
            row = self._verdicts.begin(some.identities)
            if row is not None:
                target = self._verdicts.table, row
                self._sums.compare(some.group, some.block_ids, some.slots, target)

    def cancel(self, ticket: CopyJob) -> None:
        self._due.pop(ticket, None)
        self.engine.cancel(ticket)

    def take_wrong(self) -> list[int]:
        """Return the uids of KV that is known by now to be wrong. Call with each step."""
        self._verdicts.send()
        for checked, wrong in self._verdicts.take():
            self.num_checked_blocks += len(checked)
            self._wrong.extend(wrong.tolist())
        uids, groups = uids_and_groups(np.array(self._wrong, dtype=np.int64))
        self._wrong = []
        if uids:
            log.warning("kv_came_back_wrong", uids=uids, layer_groups=groups)
        return uids

    def totals(self) -> TransferTotals:
        return replace(self.engine.totals(), num_checked_blocks=self.num_checked_blocks)

    def close(self) -> None:
        self.engine.close()
