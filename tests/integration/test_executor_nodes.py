"""A leader and its followers over a real channel, without an engine."""

import asyncio
import multiprocessing
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
from grpc import aio

from evenflow.executor.v1 import nodes_pb2_grpc as pb_grpc
from lab.stack.ports import free_port
from lab.stack.processes import EXIT_TIMEOUT_S
from services.executor.follower.membership import Membership
from services.executor.nodes.node_group import Node, NodeGroup
from services.executor.nodes.rank_processes import (
    address_towards,
    free_rendezvous_port,
    interface_of,
    kill_ranks,
)
from services.executor.nodes.servicer import NodesServicer
from services.executor.nodes.types import NodesDifferError, NodesMissingError
from services.kit.errors import UnavailableError
from services.kit.rpc import make_channel
from services.kit.server import ServiceServer

FACTS = {"dtype": "float32"}
LATE_S = 300.0
PORT = 29_500
GONE_S = 60.0  # for the kernel to end a process that was killed


@asynccontextmanager
async def leading(group: NodeGroup, port: int) -> AsyncIterator[None]:
    server = ServiceServer(f"127.0.0.1:{port}", [])
    pb_grpc.add_NodesServiceServicer_to_server(NodesServicer(group), server.grpc)
    await server.start()
    try:
        yield
    finally:
        await server.drain(0)


async def join(
    port: int,
    facts: dict[str, str] = FACTS,
    *,
    channel: aio.Channel | None = None,
    **options: Any,
) -> Membership:
    """Return a membership of an engine that has begun."""
    membership = Membership(channel or make_channel(f"127.0.0.1:{port}"))
    options = {"timeout_s": LATE_S, **options}
    assert await membership.join(1, "here", facts, **options) == PORT
    return membership


async def begin(group: NodeGroup) -> None:
    await group.gather(FACTS, timeout_s=LATE_S)
    group.begin(PORT)


async def test_a_follower_waits_for_its_leader_and_hears_of_its_end() -> None:
    port, group = free_port(), NodeGroup(2)
    joining = asyncio.create_task(join(port))
    await asyncio.sleep(0)
    async with leading(group, port):
        await begin(group)
        membership = await joining
        ended = asyncio.create_task(membership.ended())
        group.close()
        assert (await ended).startswith("OK")
    assert not group.lost.is_set()


async def test_a_leader_that_breaks_off_has_ended_for_its_follower() -> None:
    port, group = free_port(), NodeGroup(2)
    async with leading(group, port):
        joining = asyncio.create_task(join(port))
        await begin(group)
        membership = await joining
    assert not (await membership.ended()).startswith("OK")


async def test_a_follower_that_breaks_off_is_lost_to_its_leader() -> None:
    port, group = free_port(), NodeGroup(2)
    channel = make_channel(f"127.0.0.1:{port}")
    async with leading(group, port):
        joining = asyncio.create_task(join(port, channel=channel))
        await begin(group)
        await joining
        await channel.close()
        await group.lost.wait()


async def test_a_follower_that_differs_is_told_in_what() -> None:
    port, group = free_port(), NodeGroup(2)
    async with leading(group, port):
        gathering = asyncio.create_task(begin(group))
        with pytest.raises(NodesDifferError, match="dtype is float32 on node 0 and bfloat16"):
            await join(port, {"dtype": "bfloat16"})
        with pytest.raises(NodesDifferError):
            await gathering


async def test_a_follower_gives_up_when_no_leader_takes_it() -> None:
    with pytest.raises(NodesMissingError, match="no leader within"):
        await join(free_port(), timeout_s=0.5)


class TellingGroup(NodeGroup):
    """Tells when it has refused a node."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__(num_nodes)
        self.has_refused = asyncio.Event()

    async def join(self, node: Node) -> None:
        try:
            await super().join(node)
        except UnavailableError:
            self.has_refused.set()
            raise


@pytest.mark.logs("leader_awaited")
async def test_a_follower_that_was_gone_joins_the_next_engine_of_its_leader() -> None:
    port, group = free_port(), TellingGroup(2)
    channel = make_channel(f"127.0.0.1:{port}")
    async with leading(group, port):
        joining = asyncio.create_task(join(port, channel=channel))
        await begin(group)
        await joining
        await channel.close()
        await group.lost.wait()
        again = asyncio.create_task(join(port))
        await group.has_refused.wait()
    following = NodeGroup(2)
    async with leading(following, port):
        await begin(following)
        await again


def test_ranks_listen_on_the_interface_towards_the_leader() -> None:
    address = address_towards("127.0.0.1:50051")

    assert address == "127.0.0.1"
    assert interface_of(address) == "lo"
    assert interface_of("192.0.2.1") == ""
    assert 0 < free_rendezvous_port() < 65_536


def be_engine(told: Connection) -> None:
    """Be a process that has a rank, neither of which ends when asked."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank = multiprocessing.get_context("spawn").Process(target=be_rank, args=(told,))
    rank.start()
    rank.join()


def be_rank(told: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    told.send(multiprocessing.current_process().pid)
    signal.pause()


def test_all_processes_of_an_engine_are_killed_but_what_clears_up_behind_them() -> None:
    spawn = multiprocessing.get_context("spawn")
    heard, told = spawn.Pipe(duplex=False)
    engine = spawn.Process(target=be_engine, args=(told,))
    engine.start()
    assert heard.poll(EXIT_TIMEOUT_S)
    rank = psutil.Process(heard.recv())

    try:
        kill_ranks()

        engine.join(EXIT_TIMEOUT_S)
        assert engine.exitcode == -signal.SIGKILL
        _, alive = psutil.wait_procs([rank], timeout=GONE_S)
        assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        with suppress(psutil.NoSuchProcess):
            rank.kill()
