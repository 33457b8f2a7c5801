"""Composition root of a follower."""

import asyncio
import os
import socket
import sys
from asyncio import FIRST_COMPLETED
from typing import NoReturn

import structlog

from services.executor.app import require_kind, say
from services.executor.follower.membership import Membership
from services.executor.nodes.node_facts import LEADER_RANK, facts_of
from services.executor.nodes.rank_processes import announce_address, kill_ranks
from services.executor.nodes.types import LOST_EXIT_CODE, NodesError
from services.executor.settings import ExecutorSettings, prepare_engine_environment
from services.executor.types import UnsupportedError
from services.kit.rpc import make_channel
from services.kit.server import ServiceServer, stop_event
from services.kit.settings import load, refuse
from services.kit.telemetry import log, metrics

logger = structlog.get_logger()


async def follow(settings: ExecutorSettings) -> int:
    """Compute for the leader until it ends, or this node's ranks do; return the exit code.

    After SIGTERM the leader's requests may end first: that takes `drain_timeout_s` at most.
    """
    stop = asyncio.create_task(stop_event().wait())
    server = ServiceServer(
        f"{settings.host}:{settings.grpc_port}", [], transport=settings.transport
    )
    metrics.start_endpoint(settings.host, settings.metrics_port)
    await server.start()
    membership = Membership(make_channel(settings.leader_address, transport=settings.transport))
    joining = asyncio.create_task(_join(membership, settings))
    await _first_of(joining, stop)
    if not joining.done():
        return 0
    try:
        rendezvous_port = joining.result()
    except NodesError as error:
        logger.error("group_not_joined", reason=str(error))
        return error.exit_code
    except UnsupportedError as error:
        return say(error)
    logger.info("group_joined", node_rank=settings.node_rank, leader=settings.leader_address)
    ended = asyncio.create_task(membership.ended())
    computing = asyncio.create_task(_compute(settings, rendezvous_port, server))
    await _first_of(ended, computing, stop)
    await server.mark_leaving()
    if stop.done():
        drain_s = settings.drain_timeout_s
        await asyncio.wait({ended, computing}, timeout=drain_s, return_when=FIRST_COMPLETED)
        if ended.done() or not computing.done():
            return 0
    if ended.done():
        logger.error("leader_lost", reason=ended.result())
        return LOST_EXIT_CODE
    failure = computing.exception()
    if isinstance(failure, UnsupportedError):
        return say(failure)
    logger.error("ranks_died", exc_info=failure)
    return LOST_EXIT_CODE


async def _follow_to_the_end(settings: ExecutorSettings) -> NoReturn:
    exit_code = await follow(settings)
    kill_ranks()
    sys.stderr.flush()
    os._exit(exit_code)  # a thread that loads ranks, or waits for their end, cannot be interrupted


async def _join(membership: Membership, settings: ExecutorSettings) -> int:
    facts = await asyncio.to_thread(facts_of, settings)
    return await membership.join(
        settings.node_rank, socket.gethostname(), facts, timeout_s=settings.nodes_timeout_s
    )


async def _compute(settings: ExecutorSettings, rendezvous_port: int, server: ServiceServer) -> None:
    """Run this node's ranks until one dies. Raises whatever vLLM raises while they load."""
    announce_address(settings)
    from services.executor.engine.ranks import Ranks  # imports vLLM: seconds

    ranks = await asyncio.to_thread(Ranks, settings, rendezvous_port)
    await server.mark_serving()
    await asyncio.to_thread(ranks.wait_dead)


async def _first_of(*tasks: "asyncio.Task[object]") -> None:
    await asyncio.wait(tasks, return_when=FIRST_COMPLETED)


def require_follower(settings: ExecutorSettings) -> None:
    """Stop the process if the settings are not those of a follower."""
    if settings.node_rank == LEADER_RANK:
        refuse(
            "EVENFLOW_EXECUTOR_NODE_RANK: 0 is the leader, `python -m services.executor`; "
            f"a follower has one of 1 to {max(1, settings.nodes - 1)}"
        )


def main() -> None:
    settings = load(ExecutorSettings)
    log.configure("follower", settings.log_level)
    require_follower(settings)
    require_kind(settings)
    prepare_engine_environment(settings)
    asyncio.run(_follow_to_the_end(settings))
