"""Composition root of the executor."""

import asyncio
import gc
import os
import socket
import sys
from typing import TYPE_CHECKING, NoReturn

import structlog

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.executor.v1 import executor_pb2_grpc as pb_grpc
from evenflow.executor.v1 import nodes_pb2_grpc as nodes_grpc
from services.executor.model_kinds import refusal_of_files
from services.executor.nodes.node_facts import LEADER_RANK, facts_of
from services.executor.nodes.node_group import NodeGroup
from services.executor.nodes.rank_processes import (
    announce_address,
    free_rendezvous_port,
    kill_ranks,
)
from services.executor.nodes.servicer import NodesServicer
from services.executor.nodes.types import LOST_EXIT_CODE, NodesError
from services.executor.servicer import ExecutorServicer
from services.executor.serving.accounts import Accounts
from services.executor.serving.front import Front
from services.executor.serving.tracker_client import TrackerClient
from services.executor.settings import ExecutorSettings, prepare_engine_environment
from services.executor.types import UnsupportedError
from services.kit import clock
from services.kit.rpc import make_channel
from services.kit.server import ServiceServer, stop_event
from services.kit.settings import BAD_SETTINGS_EXIT_CODE, load, refuse
from services.kit.telemetry import log, metrics
from services.kit.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from services.executor.engine.engine import Engine

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ExecutorService"].full_name
LAST_FRAMES_TIMEOUT_S = 2.0  # for failures on their way to gateways

logger = structlog.get_logger()


async def serve(settings: ExecutorSettings) -> int:
    """Serve until SIGTERM, SIGINT or the engine's death; return the exit code."""
    stop = stop_event()
    server = ServiceServer(
        f"{settings.host}:{settings.grpc_port}", [SERVICE_NAME], transport=settings.transport
    )
    epoch = clock.process_epoch()
    tracker = _make_tracker(settings, epoch)
    tracing = Tracing("evenflow-executor", settings.otlp_traces_endpoint)
    front = Front(
        model_id=settings.model_id,
        adapter_ids=settings.lora_modules,
        max_num_reqs=settings.max_num_queued_reqs,
        progress=tracker,
        tracing=tracing,
    )
    group = NodeGroup(settings.nodes)
    if settings.nodes > 1:
        nodes_grpc.add_NodesServiceServicer_to_server(NodesServicer(group), server.grpc)
    servicer = ExecutorServicer(front, executor_id=settings.id, epoch=epoch)
    pb_grpc.add_ExecutorServiceServicer_to_server(servicer, server.grpc)
    metrics_port = metrics.start_endpoint(settings.host, settings.metrics_port)
    logger.info("metrics_started", port=metrics_port)
    await server.start()

    try:
        engine = await _load_engine(settings, group, stop)
    except (NodesError, UnsupportedError) as error:
        return await _give_up(server, error)
    front.serve(engine)
    await server.mark_serving()
    lease = _start_lease(settings, server.port, tracker, front)
    accounts = asyncio.create_task(Accounts(front, engine).run(), name="accounts")
    beats = asyncio.create_task(front.beat(), name="beats")
    losses = asyncio.create_task(_end_without_nodes(group), name="losses")
    await _first_of(stop, engine.died, group.lost)
    if engine.died.is_set() or group.lost.is_set():
        front.die()
        group.close()
        await server.drain(LAST_FRAMES_TIMEOUT_S)
    else:
        await _drain(settings, server, front, group)
    for task in (accounts, beats, losses):
        task.cancel()
    await _stop_reporting(tracker, lease)
    await engine.close()
    await asyncio.to_thread(tracing.close)
    return LOST_EXIT_CODE if engine.died.is_set() or group.lost.is_set() else 0


async def _give_up(server: ServiceServer, error: NodesError | UnsupportedError) -> int:
    """Say why there is no engine; return the exit code."""
    if isinstance(error, NodesError):
        logger.error("nodes_not_gathered", reason=str(error))
        await server.drain(LAST_FRAMES_TIMEOUT_S)
        return error.exit_code
    await server.drain(LAST_FRAMES_TIMEOUT_S)
    return say(error)


def say(error: UnsupportedError) -> int:
    """Say what does not work, as the process's last words; return its exit code."""
    print(error, file=sys.stderr)
    return BAD_SETTINGS_EXIT_CODE


async def _end_without_nodes(group: NodeGroup) -> None:
    """Kill the engine when a node is lost: it would wait for that node's ranks, maybe for ever."""
    await group.lost.wait()
    kill_ranks()


def _make_tracker(settings: ExecutorSettings, epoch: int) -> TrackerClient | None:
    if not settings.tracker:
        return None
    return TrackerClient(
        make_channel(settings.tracker, transport=settings.transport),
        executor_id=settings.id,
        epoch=epoch,
    )


async def _load_engine(
    settings: ExecutorSettings, group: NodeGroup, stop: asyncio.Event
) -> "Engine":
    """Load the model in a thread, while health and reflection answer already. Raises NodesError
    if its nodes do not come together, UnsupportedError if no engine can be what is asked for.
    """
    loading = asyncio.create_task(_gather_and_load(settings, group))
    events = [asyncio.create_task(event.wait()) for event in (stop, group.lost)]
    await asyncio.wait([loading, *events], return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        _abandon_loading(LOST_EXIT_CODE if group.lost.is_set() else 0)
    for event in events:
        event.cancel()
    engine = loading.result()
    await engine.open()
    return engine


async def _gather_and_load(settings: ExecutorSettings, group: NodeGroup) -> "Engine":
    if settings.nodes == 1:
        return await asyncio.to_thread(_load_model, settings, 0)
    facts = await asyncio.to_thread(facts_of, settings)
    await group.gather(facts, timeout_s=settings.nodes_timeout_s)
    announce_address(settings)
    rendezvous_port = free_rendezvous_port()
    group.begin(rendezvous_port)
    return await asyncio.to_thread(_load_model, settings, rendezvous_port)


def _load_model(settings: ExecutorSettings, rendezvous_port: int) -> "Engine":
    from services.executor.engine.engine import Engine  # imports vLLM: seconds

    return Engine.load_model(settings, rendezvous_port=rendezvous_port)


def _abandon_loading(exit_code: int) -> NoReturn:
    """Leave at once: a thread that loads a model cannot be interrupted."""
    kill_ranks()
    logger.info("loading_abandoned")
    sys.stderr.flush()
    os._exit(exit_code)


def _start_lease(
    settings: ExecutorSettings, port: int, tracker: TrackerClient | None, front: Front
) -> asyncio.Task[None] | None:
    if tracker is None:
        return None
    address = settings.advertised_address or f"{_reachable(settings.host)}:{port}"
    lease = asyncio.create_task(
        tracker.run(address=address, model=settings.model_id, get_load=front.load_for_gateways),
        name="lease",
    )
    lease.add_done_callback(_on_lease_end)
    return lease


def _reachable(host: str) -> str:
    """Return where others reach a host that listens there: by its name, if everywhere."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _on_lease_end(lease: asyncio.Task[None]) -> None:
    """Say so if reporting has crashed: tokens flow on, the tracker will hear nothing more."""
    if not lease.cancelled() and (error := lease.exception()):
        logger.error("reporting_crashed", exc_info=error)


async def _first_of(*events: asyncio.Event) -> None:
    waiters = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
    for waiter in waiters:
        waiter.cancel()


async def _drain(
    settings: ExecutorSettings, server: ServiceServer, front: Front, group: NodeGroup
) -> None:
    """Refuse new work, let live requests end, then end the streams and the server."""
    timeout_s = settings.drain_timeout_s
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.drain(timeout_s + LAST_FRAMES_TIMEOUT_S))
        tasks.create_task(_drain_front(front, group, timeout_s))


async def _drain_front(front: Front, group: NodeGroup, timeout_s: float) -> None:
    """Let live requests end, and then the followers that compute them."""
    await front.drain(timeout_s)
    group.close()


async def _stop_reporting(tracker: TrackerClient | None, lease: asyncio.Task[None] | None) -> None:
    """Send what is pending, which takes the lease, and give that back."""
    if tracker is None or lease is None:
        return
    lease.cancel()
    await asyncio.wait([lease])
    await tracker.flush()
    await tracker.release()


def require_kind(settings: ExecutorSettings) -> None:
    """Stop the process, before anything is loaded, if the model cannot have what is asked for."""
    if not settings.uses_layerwise_kv:
        return
    length = settings.max_model_len
    refusal = refusal_of_files(
        settings.model,
        settings.revision,
        max_model_len=length if isinstance(length, int) else None,
        engine_args=settings.engine_args,
    )
    if refusal is not None:
        refuse(f"EVENFLOW_EXECUTOR_LAYERWISE_KV: {refusal}")


def require_leader(settings: ExecutorSettings) -> None:
    """Stop the process if the settings are those of a follower."""
    if settings.node_rank != LEADER_RANK:
        refuse(
            f"EVENFLOW_EXECUTOR_NODE_RANK: {settings.node_rank} is a follower, "
            "`python -m services.executor.follower`"
        )


def main() -> None:
    settings = load(ExecutorSettings)
    log.configure("executor", settings.log_level)
    require_leader(settings)
    require_kind(settings)
    prepare_engine_environment(settings)
    exit_code = asyncio.run(serve(settings))
    gc.freeze()  # the collector would search vLLM's and torch's heap for seconds before the exit
    sys.exit(exit_code)
