"""Which nodes an engine begins with, and what becomes of it when one goes."""

import asyncio

import pytest

from services.executor.nodes.node_group import Node, NodeGroup
from services.executor.nodes.types import NodesDifferError, NodesMissingError
from services.kit.errors import ConflictError, InvalidRequestError, UnavailableError
from services.kit.settings import BAD_SETTINGS_EXIT_CODE

FACTS = {"dtype": "float32"}
SOON_S, LATE_S = 0.01, 300.0


def node(rank: int, **facts: str) -> Node:
    return Node(rank=rank, host=f"host-{rank}", facts={**FACTS, **facts})


async def begun(*nodes: Node) -> NodeGroup:
    """Return a group of these followers that has begun."""
    group = NodeGroup(len(nodes) + 1)
    gathering = asyncio.create_task(group.gather(FACTS, timeout_s=LATE_S))
    for each in nodes:
        await group.join(each)
    await gathering
    group.begin(29_500)
    return group


async def test_a_single_node_awaits_no_other() -> None:
    await NodeGroup(1).gather(FACTS, timeout_s=SOON_S)


@pytest.mark.logs("nodes_awaited", "node_joined")
async def test_an_engine_begins_when_all_its_nodes_have_joined() -> None:
    group = NodeGroup(3)
    gathering = asyncio.create_task(group.gather(FACTS, timeout_s=LATE_S))
    port = asyncio.create_task(group.begun())

    await group.join(node(2))
    assert group.missing == [1]
    assert not gathering.done()
    await group.join(node(1))
    await gathering
    group.begin(29_500)

    assert await port == 29_500


async def test_a_leader_names_the_nodes_that_do_not_come() -> None:
    group = NodeGroup(4)
    gathering = asyncio.create_task(group.gather(FACTS, timeout_s=SOON_S))
    await group.join(node(2))

    with pytest.raises(NodesMissingError, match=r"nodes \[1, 3\] within"):
        await gathering


@pytest.mark.logs("node_left")
async def test_a_node_that_goes_before_the_engine_begins_is_awaited_again() -> None:
    group, first = NodeGroup(3), node(1)
    gathering = asyncio.create_task(group.gather(FACTS, timeout_s=LATE_S))
    await group.join(first)
    group.leave(first)
    assert group.missing == [1, 2]

    await group.join(node(2))
    await group.join(first)
    group.leave(first)  # before the leader has had a turn
    await asyncio.wait([gathering], timeout=SOON_S)
    assert not gathering.done()
    await group.join(node(1))
    await gathering
    assert not group.lost.is_set()


async def test_a_node_whose_facts_differ_is_told_so_and_so_is_the_leader() -> None:
    group = NodeGroup(2)
    gathering = asyncio.create_task(group.gather(FACTS, timeout_s=LATE_S))

    sentence = "dtype is float32 on node 0 and bfloat16 on node 1"
    with pytest.raises(InvalidRequestError, match=sentence):
        await group.join(node(1, dtype="bfloat16"))
    with pytest.raises(NodesDifferError, match=f"host-1: {sentence}") as caught:
        await gathering
    assert caught.value.exit_code == BAD_SETTINGS_EXIT_CODE


@pytest.mark.parametrize("rank", [0, 2, -1])
async def test_a_rank_that_no_follower_has_is_refused(rank: int) -> None:
    group = NodeGroup(2)
    gathering = asyncio.create_task(group.gather(FACTS, timeout_s=LATE_S))

    with pytest.raises(InvalidRequestError, match=f"node {rank} of 2 nodes"):
        await group.join(node(rank))
    with pytest.raises(NodesDifferError):
        await gathering


async def test_a_rank_joins_once() -> None:
    group, second = NodeGroup(3), node(1)
    gathering = asyncio.create_task(group.gather(FACTS, timeout_s=LATE_S))
    await group.join(node(1))

    with pytest.raises(ConflictError, match="host-1"):
        await group.join(second)
    group.leave(second)  # was never in it

    assert group.missing == [2]
    gathering.cancel()


@pytest.mark.logs("node_lost")
async def test_a_node_that_goes_from_an_engine_is_lost() -> None:
    first = node(1)
    group = await begun(first, node(2))

    group.leave(first)

    assert group.lost.is_set()


async def test_nodes_of_an_engine_that_ends_are_let_go() -> None:
    first = node(1)
    group = await begun(first)

    group.close()
    await group.over()
    group.leave(first)

    assert not group.lost.is_set()


async def test_an_engine_that_has_begun_takes_no_more_nodes() -> None:
    group = await begun(node(1))

    with pytest.raises(UnavailableError):
        await group.join(node(1))
