"""Checks that what comes back into the pool is what once left it, block by block.

When a block leaves, its checksum is noted beside the identity of its KV: its uid and its layer
group. When a slot is loaded, both must be what the load expects. So a stale slot, another request's
block and a byte that changed on the way or at rest are all found, on each rank by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from services.executor.copies.copy_engine import (
    FOR_EVER,
    Copy,
    CopyCorruptError,
    CopyEngine,
    Direction,
    TransferTotals,
)
from services.executor.copies.pages import GroupPages
from services.executor.kv_options import GuardMode

Checksums = npt.NDArray[np.int64]  # one per block

SAMPLE_EVERY = 32  # loads of a layer group until each of its blocks was checked once
ROWS_AT_ONCE = 16
WORD_BYTES = 8
EVERY_BLOCK = slice(0, None, 1)
_GROUP_BITS = 10  # an engine has fewer layer groups than two to this power
_ABSENT = 0  # identity of a slot that nothing was saved to


class BlockChecksums:
    """Weighs the words of blocks with odd numbers, modulo 2**64.

    A change within one word of 8 bytes always shows, for an odd weight loses nothing; words that
    change places show because their weights differ.
    """

    def __init__(self, pages: Sequence[GroupPages]) -> None:
        self._words = [tuple(pool.numpy().view(np.int64) for pool in group.pool) for group in pages]
        self._weights = block_weights(pages)

    def of(self, group: int, block_ids: Sequence[int]) -> Checksums:
        """Return the checksums of what pool blocks hold now."""
        sums = np.zeros(len(block_ids), dtype=np.int64)
        rows = list(block_ids)
        layers = self._words[group]
        for words, weights in zip(layers, self._weights[: len(layers)], strict=True):
            # A few rows at a time: they stay in the processor's cache.
            for start in range(0, len(rows), ROWS_AT_ONCE):
                some = slice(start, start + ROWS_AT_ONCE)
                sums[some] += np.einsum("ij,j->i", words[rows[some]], weights)
        return sums


def block_weights(pages: Sequence[GroupPages]) -> list[Checksums]:
    """Return the weights of a block's words, layer by layer of the group that has most."""
    longest = max((group.pool for group in pages), key=len)
    rng = np.random.default_rng(0)
    return [
        rng.integers(-(2**63), 2**63 - 1, pool.shape[1] // WORD_BYTES, dtype=np.int64) | 1
        for pool in longest
    ]


@dataclass(slots=True, eq=False)
class GuardedTicket:
    copy: Copy
    ticket: Any
    expected: Checksums  # of the blocks that are checked
    checked: slice  # which of the copy's blocks these are
    fault: str = ""  # what is wrong, once that is known
    cancelled: bool = False
    is_checked: bool = False

    @property
    def done(self) -> bool:
        return bool(self.ticket.done)

    @property
    def waits_for_layers(self) -> bool:
        return bool(self.ticket.waits_for_layers)


class GuardedEngine:
    """A `CopyEngine` whose loads fail with CopyCorruptError when `wait` finds a wrong block.

    Only copies with an identity are guarded. A checksum is taken when a save is submitted: from
    then on nobody changes the block.
    """

    def __init__(
        self, engine: CopyEngine, pages: Sequence[GroupPages], *, num_slots: int, mode: GuardMode
    ) -> None:
        self.engine = engine
        self.num_checked_blocks = 0  # since the start
        self._checksums = BlockChecksums(pages)
        self._every = SAMPLE_EVERY if mode is GuardMode.SAMPLE else 1
        self._num_loads = [0] * len(pages)  # of each layer group
        self._wrong: list[int] = []  # identities of blocks that nobody copied
        # What each slot holds, by slot.
        self._identities = np.full(num_slots, _ABSENT, dtype=np.int64)
        self._sums = np.zeros(num_slots, dtype=np.int64)

    def submit(self, copy: Copy) -> GuardedTicket:
        checked = slice(0, 0)
        if copy.identities and copy.direction is Direction.D2H:
            slots = list(copy.slots)
            self._sums[slots] = self._checksums.of(copy.group, copy.block_ids)
            self._identities[slots] = identities(copy, EVERY_BLOCK)
        elif copy.identities:
            checked = self._next_sample(copy.group)
        slots = list(copy.slots[checked])
        ticket = GuardedTicket(copy, None, self._sums[slots], checked)
        if slots:
            is_foreign = self._identities[slots] != identities(copy, checked)
            if is_foreign.any():
                ticket.fault = f"slot {slots[int(is_foreign.argmax())]} holds other KV"
        ticket.ticket = self.engine.submit(copy)
        return ticket

    def _next_sample(self, group: int) -> slice:
        """Return which blocks of the group's next load are checked."""
        self._num_loads[group] += 1
        return slice(self._num_loads[group] % self._every, None, self._every)

    def check(self, copy: Copy) -> None:
        """See `LateGuard`."""
        checked = self._next_sample(copy.group)
        slots, block_ids = list(copy.slots[checked]), copy.block_ids[checked]
        if not slots:
            return
        self.num_checked_blocks += len(slots)
        expected = identities(copy, checked)
        is_wrong = self._identities[slots] != expected
        is_wrong |= self._checksums.of(copy.group, block_ids) != self._sums[slots]
        self._wrong.extend(expected[is_wrong].tolist())

    def take_wrong(self) -> list[int]:
        """See `LateGuard`: only of blocks that nobody copied, for `wait` tells of the others."""
        if not self._wrong:
            return []
        uids, _ = uids_and_groups(np.array(self._wrong, dtype=np.int64))
        self._wrong = []
        return uids

    def wait(self, ticket: GuardedTicket, timeout_s: float = FOR_EVER) -> float:
        waited_s = self.engine.wait(ticket.ticket, timeout_s)
        if ticket.cancelled:
            return waited_s
        if not ticket.is_checked:
            ticket.is_checked = True
            self._check(ticket)
        if ticket.fault:
            raise CopyCorruptError(ticket.fault)
        return waited_s

    def _check(self, ticket: GuardedTicket) -> None:
        block_ids = ticket.copy.block_ids[ticket.checked]
        if not block_ids or ticket.fault:
            return
        self.num_checked_blocks += len(block_ids)
        is_changed = self._checksums.of(ticket.copy.group, block_ids) != ticket.expected
        if is_changed.any():
            ticket.fault = f"block {block_ids[int(is_changed.argmax())]} is not what was saved"

    def cancel(self, ticket: GuardedTicket) -> None:
        ticket.cancelled = True
        self.engine.cancel(ticket.ticket)

    def totals(self) -> TransferTotals:
        totals = self.engine.totals()
        if not self.num_checked_blocks:
            return totals
        return replace(totals, num_checked_blocks=self.num_checked_blocks)

    def close(self) -> None:
        self.engine.close()


def identities(copy: Copy, part: slice) -> Checksums:
    """Return one number per block of a part that stands for its KV; never that of an empty slot.

    The part has a beginning and a step, and goes on to the end.
    """
    uids: list[int] = []
    start = part.start
    for identity in copy.identities:
        uids.extend(identity.uids[start :: part.step])
        start = (start - len(identity.uids)) % part.step  # of the part within the next one
    in_group = (np.array(uids, dtype=np.int64) << _GROUP_BITS) | copy.group
    return (in_group << 1) | 1


def uids_and_groups(found: Checksums) -> tuple[list[int], list[int]]:
    """Return the blocks' uids and layer groups that `identities` made these numbers of."""
    in_group = found >> 1
    uids, groups = in_group >> _GROUP_BITS, in_group & ((1 << _GROUP_BITS) - 1)
    return uids.tolist(), groups.tolist()
