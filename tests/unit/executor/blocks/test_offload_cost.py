"""Offloading one more layer group of a request: what it costs does not grow with the context."""

import pickle
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool

import services.executor.blocks
from services.executor.blocks.block_owner import BlockOwner
from services.executor.blocks.host_pool import HostPool
from services.executor.blocks.residency import RequestKV
from services.executor.blocks.transfers.transfers import Transfers
from services.placement.blocks import BlockGeometry
from services.placement.layer_placement import LayerPlacement
from tests.unit.records import make_record

pytestmark = pytest.mark.filterwarnings("default")

NUM_GROUPS, BLOCK_SIZE = 12, 16
PACKAGE = services.executor.blocks.__path__[0]


def num_calls(work: Callable[[], None]) -> int:
    """Return how many functions of the package run, comprehensions included."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def resident_request(num_blocks: int) -> tuple[BlockOwner, Transfers, RequestKV]:
    """Return a request whose blocks are all in the pool, and copied to the host."""
    record = make_record("r")
    owner = BlockOwner(
        BlockPool(2 * NUM_GROUPS * num_blocks, False, BLOCK_SIZE),
        HostPool(NUM_GROUPS * num_blocks),
        BlockGeometry(num_groups=NUM_GROUPS, block_size=BLOCK_SIZE),
        {"r": record},
    )
    transfers = Transfers(owner, num_ranks=1, write_budget=lambda _: 1_000_000)
    num_tokens = num_blocks * BLOCK_SIZE
    request = owner.draft(
        record,
        LayerPlacement(offloaded=frozenset(), num_staging=2),
        num_slots=NUM_GROUPS * num_blocks,
    )
    owner.adopt(request)
    owner.growth.grow(request, num_tokens=num_tokens, num_accepted=num_tokens)
    transfers.plan_step({"r": num_tokens})
    transfers.write_through.confirm(1)
    return owner, transfers, request


def cost_of_one_more(num_blocks: int) -> tuple[int, int]:
    """Return the calls, and the bytes of the message, for the second of twelve groups.

    Every other one is away.
    """
    owner, transfers, request = resident_request(num_blocks)
    num_tokens = num_blocks * BLOCK_SIZE
    owner.offload(request, range(0, NUM_GROUPS, 2))
    transfers.plan_step({"r": num_tokens})

    messages = []

    def offload() -> None:
        owner.offload(request, [1])
        messages.append(transfers.plan_step({"r": num_tokens}))

    calls = num_calls(offload)
    owner.check_integrity()
    assert request.offloaded == [0, 1, 2, 4, 6, 8, 10]
    assert not any(group.own for group in request.groups if group.offloaded)
    assert len(messages[0].table_updates) == 6  # the group, and those that change their buffer
    return calls, len(pickle.dumps(messages[0]))


def test_one_more_group_costs_as_many_calls_and_bytes_whatever_the_context() -> None:
    # Numbers from 256 to 65,535 are as many bytes each.
    assert cost_of_one_more(3_000) == cost_of_one_more(300)


def cost_of_the_first(num_groups: int, *, num_blocks: int = 300) -> int:
    """Return the calls for so many groups that leave together, as the first ones."""
    owner, _, request = resident_request(num_blocks)

    calls = num_calls(lambda: owner.offload(request, range(num_groups)))

    owner.check_integrity()
    assert not any(group.own for group in request.groups if group.offloaded)
    assert len(request.staging) == 2
    assert request.staging_length == num_blocks
    return calls


def test_groups_that_leave_together_take_no_call_for_each_ones_blocks() -> None:
    assert cost_of_the_first(10) - cost_of_the_first(2) < 300
