"""Stacked block tables answer as vLLM's own."""

import numpy as np
import pytest
import torch
from vllm.v1.worker.block_table import MultiGroupBlockTable

from services.executor.plugin.block_tables import StackedBlockTables

pytestmark = pytest.mark.filterwarnings("default")

NUM_GROUPS = 3
BLOCK_SIZE = 32
MAX_NUM_REQS = 8
MAX_NUM_TOKENS = 512


def make_tables() -> MultiGroupBlockTable:
    """Return vLLM's tables with rows of random blocks."""
    tables = MultiGroupBlockTable(
        max_num_reqs=MAX_NUM_REQS,
        max_num_batched_tokens=MAX_NUM_TOKENS,
        pin_memory=False,
        device=torch.device("cpu"),
        block_sizes=[BLOCK_SIZE] * NUM_GROUPS,
        max_num_blocks=[16] * NUM_GROUPS,
    )
    rng = np.random.default_rng(7)
    for row in range(MAX_NUM_REQS):
        rows = tuple(rng.integers(1, 900, 16).tolist() for _ in range(NUM_GROUPS))
        tables.add_row(rows, row)
    return tables


def slots_of(
    tables: MultiGroupBlockTable, num_tokens: list[int], first_positions: list[int]
) -> list[list[int]]:
    """Return each group's slots of requests that compute so many tokens from such positions."""
    starts = torch.tensor([0, *np.cumsum(num_tokens)], dtype=torch.int32)
    positions = torch.cat(
        [torch.arange(p, p + n) for p, n in zip(first_positions, num_tokens, strict=True)]
    )
    tables.commit_block_table(len(num_tokens))
    tables.compute_slot_mapping(len(num_tokens), starts, positions)
    return [
        tables[group].slot_mapping.gpu[: len(positions)].tolist() for group in range(NUM_GROUPS)
    ]


@pytest.mark.parametrize(
    ("num_tokens", "first_positions"),
    [
        ([1, 1, 1], [0, 31, 500]),  # all decode
        ([1], [32]),
        ([40, 1, 130], [20, 64, 0]),  # chunks across block boundaries
        ([2, 1], [31, 32]),
    ],
)
def test_slots_are_those_of_vllm(num_tokens: list[int], first_positions: list[int]) -> None:
    tables = make_tables()
    expected = [
        [
            int(tables[group].block_table.np[row, position // BLOCK_SIZE]) * BLOCK_SIZE
            + position % BLOCK_SIZE
            for row, (first, n) in enumerate(zip(first_positions, num_tokens, strict=True))
            for position in range(first, first + n)
        ]
        for group in range(NUM_GROUPS)
    ]

    assert slots_of(StackedBlockTables(tables), num_tokens, first_positions) == expected


@pytest.mark.parametrize("num_padded", [3, 5])
def test_views_of_all_groups_are_those_of_each(num_padded: int) -> None:
    stacked = StackedBlockTables(make_tables())
    expected = slots_of(stacked, [1, 2], [40, 64])

    slots = stacked.slots_of_groups(3, num_padded=num_padded)
    rows = stacked.rows_of_groups(2)

    assert [mine.tolist() for mine in slots] == [one + [-1] * (num_padded - 3) for one in expected]
    for group in range(NUM_GROUPS):
        assert torch.equal(rows[group], stacked[group].get_device_tensor(2))
        assert slots[group].data_ptr() == stacked[group].slot_mapping.gpu.data_ptr()


def test_rows_that_change_after_stacking_are_the_ones_that_count() -> None:
    stacked = StackedBlockTables(make_tables())
    stacked.add_row(tuple([100 * (group + 1)] for group in range(NUM_GROUPS)), 1)
    stacked.append_row(tuple([5 + group] for group in range(NUM_GROUPS)), 1)
    stacked.move_row(1, 0)

    assert slots_of(stacked, [1], [32]) == [[5 * 32], [6 * 32], [7 * 32]]
    tensor = stacked[2].get_device_tensor(1)
    assert tensor[0, :2].tolist() == [300, 7]
