"""The sums of blocks of the pool, taken, kept and compared on the device."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from services.executor.copies.copy_job import Indices
from services.executor.copies.pages import GroupPages
from services.executor.copies.streams import Device

Checksums = npt.NDArray[np.int64]

BLOCKS_AT_ONCE = 32  # bounds what is gathered: some MiB
WORD_BYTES = 8


class PoolSums:
    """One sum per host slot, of what its block held when it left. Work of the compute stream.

    Words of blocks are weighed with odd numbers, modulo 2**64. A change within one word of 8 bytes
    always shows, for an odd weight loses nothing; words that change places show because their
    weights differ.
    """

    def __init__(self, pages: Sequence[GroupPages], device: Device, *, num_slots: int) -> None:
        self._pages, self._device = pages, device
        where = pages[0].pool[0].device
        self._words = [tuple(pool.view(torch.int64) for pool in group.pool) for group in pages]
        self._weights = [torch.from_numpy(layer).to(where) for layer in block_weights(pages)]
        self.table = torch.zeros((num_slots, 8), dtype=torch.uint8, device=where)
        self._sums = self.table.view(torch.int64)[:, 0]

    def note(self, group: int, block_ids: Indices, slots: Indices) -> None:
        """Keep the sums of blocks, each for its slot."""
        for start in range(0, len(slots), BLOCKS_AT_ONCE):
            some = slice(start, start + BLOCKS_AT_ONCE)
            self._note(group, block_ids[some], slots[some])

    def _note(self, group: int, block_ids: Indices, slots: Indices) -> None:
        def work() -> None:
            blocks, rows = self._sent(block_ids, slots)
            self._sums.index_copy_(0, rows, self._of(group, blocks))

        reads = [(pool, block_ids) for pool in self._pages[group].pool]
        self._device.calculate(work, reads=reads, writes=[(self.table, slots)])

    def compare(
        self, group: int, block_ids: Indices, slots: Indices, verdicts: tuple[torch.Tensor, int]
    ) -> None:
        """Write to a row of verdicts which of at most `BLOCKS_AT_ONCE` blocks differ."""
        table, row = verdicts

        def work() -> None:
            blocks, rows = self._sent(block_ids, slots)
            differs = self._of(group, blocks) != self._sums.index_select(0, rows)
            table[row, : len(slots)].copy_(differs)

        reads = [(pool, block_ids) for pool in self._pages[group].pool]
        reads.append((self.table, slots))
        self._device.calculate(work, reads=reads, writes=[(table, np.array([row]))])

    def _sent(self, block_ids: Indices, slots: Indices) -> torch.Tensor:
        """Return both on the device. So few bytes are taken in by the call: nothing waits."""
        both = torch.from_numpy(np.stack((block_ids, slots)))
        return both.to(self.table.device, non_blocking=True)

    def _of(self, group: int, blocks: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(len(blocks), dtype=torch.int64, device=blocks.device)
        layers = self._words[group]
        for words, weights in zip(layers, self._weights[: len(layers)], strict=True):
            sums += words.index_select(0, blocks).mul_(weights).sum(1)
        return sums


def block_weights(pages: Sequence[GroupPages]) -> list[Checksums]:
    """Return the weights of a block's words, layer by layer of the group that has most."""
    longest = max((group.pool for group in pages), key=len)
    rng = np.random.default_rng(0)
    return [
        rng.integers(-(2**63), 2**63 - 1, pool.shape[1] // WORD_BYTES, dtype=np.int64) | 1
        for pool in longest
    ]
