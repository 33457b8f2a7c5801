"""How many pool blocks a placement needs."""

import pytest

from services.placement.capacity import (
    Demand,
    blocks_needed,
    prefill_reread_blocks,
)
from services.placement.step_time.patterns import RESIDENT, Pattern
from tests.unit.placement.closed_forms import blocks_while_restoring


@pytest.mark.parametrize(
    ("num_tokens", "num_offloaded", "num_buffers", "expected"),
    [
        # 4 groups of 16-token blocks. 32 tokens: 2 full blocks, none open.
        (32, 0, 0, 8),
        (32, 1, 1, 3 * 2 + 2),
        (32, 3, 2, 1 * 2 + 2 * 2),
        (32, 4, 1, 2),
        # 33 tokens: 2 full and 1 open; the open block of an offloaded group stays.
        (33, 0, 0, 12),
        (33, 1, 1, 3 * 3 + 2 + 1),
        (33, 4, 2, 2 * 2 + 4),
        (31, 4, 1, 1 + 4),
        # More buffers than offloaded groups are not used.
        (32, 1, 2, 3 * 2 + 2),
        (0, 2, 1, 0),
    ],
)
def test_blocks_follow_the_formula(num_tokens, num_offloaded, num_buffers, expected) -> None:
    demand = Demand(num_tokens=num_tokens, block_size=16, num_groups=4)

    assert blocks_needed(demand, num_offloaded=num_offloaded, num_buffers=num_buffers) == expected


def test_a_block_being_sealed_counts_once_per_offloaded_group() -> None:
    demand = Demand(num_tokens=33, block_size=16, num_groups=4, num_extra_blocks=1)

    assert blocks_needed(demand, num_offloaded=3, num_buffers=1) == 3 + 2 + 3 * (1 + 1)


@pytest.mark.parametrize(
    ("present", "target", "extra"),
    [
        (Pattern((1, 3), 2), RESIDENT, 2 * 2),  # both staging buffers until the layers are back
        (Pattern((1, 3), 2), Pattern((1,), 1), 1 * 2),
        (Pattern((1,), 1), Pattern((1, 3), 1), 0),  # nothing comes back
        (RESIDENT, Pattern((1, 3), 1), 0),
    ],
)
def test_restored_layers_hold_their_staging_as_well(present, target, extra) -> None:
    demand = Demand(num_tokens=32, block_size=16, num_groups=4)
    steady = blocks_needed(
        demand, num_offloaded=target.num_offloaded, num_buffers=target.num_buffers
    )

    assert blocks_while_restoring(demand, present=present, target=target) == steady + extra


def test_a_chunked_prefill_rereads_every_earlier_chunk() -> None:
    # 100 tokens in chunks of 32: chunks 2, 3, 4 re-read 32, 64, 96 tokens = 2 + 4 + 6 blocks.
    assert prefill_reread_blocks(100, 32, 16) == 12
    assert prefill_reread_blocks(32, 32, 16) == 0
