from dataclasses import replace

import pytest

from services.placement.blocks import STATE
from services.placement.types import EngineShape
from simulator.memory.room import pool_tokens, stock_shape

SHAPE = EngineShape(
    num_layers=10,
    layers_per_group=1,
    block_size=16,
    num_blocks=100_000,
    block_bytes=1,
    max_num_seqs=8,
    max_num_batched_tokens=512,
)


@pytest.mark.parametrize(
    ("num_full", "windows", "num_in_stock", "num_padding"),
    [
        (10, (1_024,) * 52, 10, 8),  # as Gemma 3 27B: six groups of ten windows
        (18, (128,) * 18, 18, 0),
        (12, (128,) * 13, 13, 0),  # the commonest kind's number: less than 1.5 times as many
        (13, (128,) * 12, 13, 1),
        (10, (128,) * 15, 10, 5),
        (10, (), 10, 0),
        (4, (64,) * 4 + (256,) * 7, 4, 1),  # each window is a kind
    ],
)
def test_stock_vllm_pads_groups_of_layers_to_one_size(
    num_full: int, windows: tuple[int, ...], num_in_stock: int, num_padding: int
) -> None:
    shape = replace(SHAPE, num_layers=num_full, side_windows=windows)
    stock = stock_shape(shape)

    assert stock is not None
    assert stock.num_groups == num_in_stock
    assert len(stock.side_windows) == len(windows) + num_padding
    assert set(stock.side_windows) == set(windows)
    is_padded = stock != shape
    tokens = [pool_tokens(one, request_tokens=4_096) for one in (stock, shape)]
    assert (tokens[0] < tokens[1]) is is_padded


def test_stock_vllms_pages_of_states_are_not_told() -> None:
    assert stock_shape(replace(SHAPE, side_windows=(STATE, STATE))) is None
