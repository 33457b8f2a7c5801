"""Checks that what comes back into the pool is what once left it: a sample of blocks.

When a block leaves, the identity of its KV is noted for its slot: its uid and its layer group. When
a slot is loaded, it must be the one that the load expects. So a stale slot and another request's
block are found, on each rank by itself.

Bytes are checked on the device, by work of the compute stream, where the layers are. The sum of a
block is taken when its copy to the host is submitted, of what layers have written; and again once a
load was waited for, of what layers will read. So a copy that starts too early, a source that is
reused too soon and a load that no layer waits for show, like a byte that changes on the host.
Verdicts leave by a stream of their own: on a CPU they are known with the step, on a GPU a step or
two later, and no thread waits for them, and no layer.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import structlog
import torch

from services.executor.copies.copy_engine import (
    FOR_EVER,
    Copy,
    CopyEngine,
    Direction,
    TransferTotals,
)
from services.executor.copies.copy_job import Indices
from services.executor.copies.device.pool_sums import BLOCKS_AT_ONCE, Checksums, PoolSums
from services.executor.copies.device.stream_copy_engine import StreamCopyEngine
from services.executor.copies.pages import GroupPages
from services.executor.copies.streams import CopyBatch, Device, Event, Layers, Part
from services.executor.kv_options import GuardMode

log = structlog.get_logger()

MAX_OPEN_CHECKS = 4096  # whose verdicts the host has not read; what comes on top is not checked
SAMPLE_EVERY = 32  # blocks until one gets a sum, and loads of a layer group until one is checked
_GROUP_BITS = 10  # an engine has fewer layer groups than two to this power
_ABSENT = 0  # identity of a slot that nothing was saved to


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
        part = Part(CopyBatch(Layers([self.table], [self._on_host]), rows, rows), 0, len(rows))
        begun, self._begun = self._begun, []
        try:
            self._device.copy(
                self._stream, part, source_is_stable=False, failed=_tell_that_they_are_lost
            )
        except Exception as error:  # noqa: BLE001  # a step goes on without verdicts
            _tell_that_they_are_lost(error)
            self._free.extend(check.row for check in begun)
        else:
            self._leaving.append((self._stream.record(), begun))

    def take(self) -> list[tuple[Checksums, Checksums]]:
        """Return what has arrived since the last call: blocks, and those of them that are wrong."""
        found = []
        while self._leaving and self._leaving[0][0].query():
            for check in self._leaving.popleft()[1]:
                is_wrong = self._on_host.numpy()[check.row, : len(check.identities)] != 0
                found.append((check.identities, check.identities[is_wrong]))
                self._free.append(check.row)
        return found


def _tell_that_they_are_lost(error: Exception) -> None:
    log.error("verdicts_lost", reason=str(error))


class IntegrityGuard:
    """A `CopyEngine` over another. Waits let everything pass; `take_wrong` tells what was wrong.

    Of `SAMPLE_EVERY` blocks that a layer group saves, one gets a sum; of as many of its loads, one
    is checked: all identities, and the sums that there are. In `GuardMode.ALL` all of both.
    Only copies with an identity are guarded.
    """

    def __init__(
        self,
        engine: StreamCopyEngine,
        pages: Sequence[GroupPages],
        *,
        num_slots: int,
        mode: GuardMode,
    ) -> None:
        self.engine: CopyEngine = engine
        self.num_checked_blocks = 0  # since the start
        self._every = SAMPLE_EVERY if mode is GuardMode.SAMPLE else 1
        self._sums = PoolSums(pages, engine.device, num_slots=num_slots)
        self._verdicts = Verdicts(engine.device, pages[0].pool[0].device)
        # Of each layer group; apart, so that not all are due in one step.
        self._num_saved_blocks, self._num_loads = list(range(len(pages))), list(range(len(pages)))
        # What each slot holds, by slot, and whether its block has a sum.
        self._held = np.full(num_slots, _ABSENT, dtype=np.int64)
        self._has_sum = np.zeros(num_slots, dtype=np.bool_)
        self._due: dict[Any, Expected] = {}  # tickets that were not waited for
        self._wrong: list[int] = []  # identities

    def submit(self, copy: Copy) -> Any:
        if copy.identities and copy.direction is Direction.D2H:
            self._watch(copy)
        ticket = self.engine.submit(copy)
        if copy.identities and copy.direction is Direction.H2D and self._is_due(copy.group):
            self._due[ticket] = self._expected(copy)
        return ticket

    def _is_due(self, group: int) -> bool:
        """Count a load of a group; return whether it is one to be checked."""
        self._num_loads[group] += 1
        return self._num_loads[group] % self._every == 0

    def check(self, copy: Copy) -> None:
        """See `LateGuard`."""
        if self._is_due(copy.group):
            self._check(self._expected(copy))

    def _watch(self, copy: Copy) -> None:
        """Note what slots are given, and take the sums of some blocks that are to leave."""
        slots = np.asarray(copy.slots, dtype=np.int64)
        self._held[slots] = identities(copy)
        self._has_sum[slots] = False
        first = -self._num_saved_blocks[copy.group] % self._every
        self._num_saved_blocks[copy.group] += len(slots)
        if first < len(slots):
            chosen = slice(first, None, self._every)
            self._has_sum[slots[chosen]] = True
            block_ids = np.asarray(copy.block_ids, dtype=np.int64)[chosen]
            self._sums.note(copy.group, block_ids, slots[chosen])

    def _expected(self, copy: Copy) -> Expected:
        """Return the blocks whose slots hold what a load expects; the others are wrong."""
        slots = np.asarray(copy.slots, dtype=np.int64)
        block_ids = np.asarray(copy.block_ids, dtype=np.int64)
        expected = Expected(copy.group, slots, block_ids, identities(copy))
        is_foreign = self._held[slots] != expected.identities
        self._wrong.extend(expected.identities[is_foreign].tolist())
        return expected.only(~is_foreign)

    def wait(self, ticket: Any, timeout_s: float = FOR_EVER) -> float:
        expected = self._due.pop(ticket, None)
        waited_s = self.engine.wait(ticket, timeout_s)
        if expected is not None:
            self._check(expected)
        return waited_s

    def _check(self, expected: Expected) -> None:
        """Compare those that have sums: slots that were saved to since may have none, or others."""
        slots = expected.slots
        is_same = self._held[slots] == expected.identities
        expected = expected.only(is_same & self._has_sum[slots])
        for start in range(0, len(expected.slots), BLOCKS_AT_ONCE):
            some = expected.only(slice(start, start + BLOCKS_AT_ONCE))
            row = self._verdicts.begin(some.identities)
            if row is not None:
                target = self._verdicts.table, row
                self._sums.compare(some.group, some.block_ids, some.slots, target)

    def cancel(self, ticket: Any) -> None:
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


def identities(copy: Copy) -> Checksums:
    """Return one number per block that stands for its KV; never that of an empty slot."""
    uids = [uid for identity in copy.identities for uid in identity.uids]
    in_group = (np.array(uids, dtype=np.int64) << _GROUP_BITS) | copy.group
    return (in_group << 1) | 1


def uids_and_groups(found: Checksums) -> tuple[list[int], list[int]]:
    """Return the blocks' uids and layer groups that `identities` made these numbers of."""
    in_group = found >> 1
    uids, groups = in_group >> _GROUP_BITS, in_group & ((1 << _GROUP_BITS) - 1)
    return uids.tolist(), groups.tolist()
