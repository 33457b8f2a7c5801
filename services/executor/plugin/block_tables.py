"""The block tables of all layer groups as one array, so that a step touches them all at once.

vLLM goes through the groups one by one, with a kernel launch and a copy each.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.block_table import MultiGroupBlockTable


class StackedBlockTables(MultiGroupBlockTable):  # type: ignore[misc]
    """On CPU, where the tables that are written and the tables that are read are the same.

    Each group's table and slot mapping are views, so that whoever asks for a group gets what vLLM
    would have given.
    """

    def __init__(self, tables: MultiGroupBlockTable) -> None:
        """Take over vLLM's tables, which must be alike and may hold rows already."""
        self.block_tables = tables.block_tables
        first = self.block_tables[0]
        self._block_size = first.block_size
        # [num_groups, max_num_reqs, max_num_blocks_per_req], [num_groups, max_num_batched_tokens]
        self._rows = self._stack("block_table")
        self._slots = self._stack("slot_mapping")

    def rows_of_groups(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        """Return each group's block table of the first requests."""
        rows: tuple[torch.Tensor, ...] = torch.from_numpy(self._rows[:, :num_reqs]).unbind()
        return rows

    def slots_of_groups(self, num_tokens: int, *, num_padded: int) -> tuple[torch.Tensor, ...]:
        """Return each group's slots of a step, up to `num_padded` tokens, those behind it -1."""
        if num_padded > num_tokens:
            self._slots[:, num_tokens:num_padded] = -1
        slots: tuple[torch.Tensor, ...] = torch.from_numpy(self._slots[:, :num_padded]).unbind()
        return slots

    def _stack(self, name: str) -> np.ndarray[Any, Any]:
        buffers = [getattr(table, name) for table in self.block_tables]
        stacked = torch.stack([buffer.cpu for buffer in buffers])
        for buffer, view in zip(buffers, stacked, strict=True):
            buffer.cpu = buffer.gpu = view
            buffer.np = view.numpy()
        array: np.ndarray[Any, Any] = stacked.numpy()
        return array

    def commit_block_table(self, num_reqs: int) -> None:
        """Nothing to copy."""

    def compute_slot_mapping(
        self, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Say where each token's KV goes: block id * block size + offset, in every group."""
        num_tokens = positions.shape[0]
        rows = np.arange(num_reqs)
        if num_tokens != num_reqs:
            rows = np.repeat(rows, np.diff(query_start_loc.numpy()))
        blocks, offsets = np.divmod(positions.numpy(), self._block_size)
        first_slots = self._rows[:, rows, blocks] * np.int64(self._block_size)
        np.add(first_slots, offsets, out=self._slots[:, :num_tokens])
