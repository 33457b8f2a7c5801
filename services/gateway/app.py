"""Composition root of the gateway: one process, one event loop, an HTTP and a gRPC edge."""

import asyncio
import gc
import math
import socket
import ssl
from asyncio import sleep
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
import uvicorn
import uvloop
from fastapi import FastAPI
from prometheus_client import REGISTRY

from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from evenflow.tracker.v1.tracker_pb2_grpc import TrackerServiceStub
from services.gateway.access.api_keys import ApiKeys
from services.gateway.access.key_sources import (
    REDIS_TIMEOUT_S,
    FileKeys,
    KeySource,
    RedisKeys,
    follow,
)
from services.gateway.executors import discovery
from services.gateway.executors.directory import TrackerDirectory
from services.gateway.executors.discovery import DnsSource, Place, Source
from services.gateway.executors.fleet import Fleet
from services.gateway.executors.gauges import ExecutorGauges, InHand
from services.gateway.executors.heartbeat import StallLimits
from services.gateway.executors.link import ExecutorLink, LinkOptions
from services.gateway.executors.watches import Watches
from services.gateway.http.edge import HttpEdge, allow_origins
from services.gateway.http.guard import GrpcGuard, HttpGuard
from services.gateway.http.page import add_page
from services.gateway.http.protocol import BoundedHttpProtocol, ConnectionLimits, Connections
from services.gateway.http.routes import make_app
from services.gateway.http.sizing import add_sizing
from services.gateway.live.dispatcher import Dispatcher, DispatchLimits
from services.gateway.live.failover.rules import FailoverLimits
from services.gateway.live.pacer import Pacer, TimerHandle
from services.gateway.live.reader import ReaderLimits
from services.gateway.live.reports import DeliveryReports, NoReports
from services.gateway.resumable.streams import ResumableStreams, ResumeLimits
from services.gateway.servicer import GatewayServicer
from services.gateway.settings import GatewaySettings
from services.kit import clock
from services.kit.redis_url import refusal_of_cluster
from services.kit.rpc import make_channel
from services.kit.server import ServiceServer, stop_event
from services.kit.settings import load, refuse
from services.kit.telemetry import log, metrics
from services.kit.telemetry.tracing import Tracing
from services.kit.tls import renew_with_files
from services.reporting.reporter import Sender, SenderKind, TrackerReporter

if TYPE_CHECKING:
    from evenflow.tracker.v1.tracker_pb2_grpc import TrackerServiceAsyncStub

logger = structlog.get_logger()

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GatewayService"].full_name
SEND_BUFFER_BYTES = 64 << 10  # of a connection: what it holds counts as delivered, so it is small
# Python's own but the last: a full collection, in which no token goes out, walks all live requests.
GC_THRESHOLDS = (700, 10, 200)
CALLS_PER_LIVE_REQUEST = 2  # of gRPC, at most: those that are refused, cancel or watch too
CLOSE_MARGIN_S = 2  # after the drain, for last events to go out before connections are cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A gateway that serves."""

    dispatcher: Dispatcher
    pacer: Pacer
    streams: ResumableStreams
    http_port: int
    grpc_port: int


class _HttpServer(uvicorn.Server):
    """uvicorn in a process that handles its own signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def run_gateway(settings: GatewaySettings) -> AsyncIterator[Gateway]:
    """Serve while the block runs, then drain: live streams end, or are ended after the timeout."""
    key_source = _key_source(settings)
    keys = ApiKeys(None if key_source else ())
    listener = _listen(settings.host, settings.http_port)
    tracing = Tracing("evenflow-gateway", settings.otlp_traces_endpoint)
    pacer = Pacer(clock=clock.monotonic_s, timer=_call_later)
    news = asyncio.Event()  # executors have come or gone
    async with _tracker(settings) as (directory, reports), asyncio.TaskGroup() as tasks:
        fleet = _fleet(settings, directory, news)
        background = [tasks.create_task(fleet.run())]
        dispatcher = Dispatcher(
            fleet.links,
            pacer=pacer,
            reports=reports,
            limits=_limits(settings),
            clock=clock.monotonic_s,
        )
        dispatcher.tracing = tracing
        streams = _streams(settings, dispatcher)
        works = (dispatcher.watch_readers(), dispatcher.moves.run(), streams.watch())
        background += [tasks.create_task(work) for work in works]
        if key_source is not None:
            following = follow(key_source, keys, interval_s=settings.api_keys_refresh_s)
            background.append(tasks.create_task(following))
        servicer = GatewayServicer(dispatcher, streams)
        rpc_server = _rpc_server(settings, servicer, keys)

        def is_leaving() -> bool:
            return dispatcher.is_leaving

        watches = Watches(fleet.links, is_leaving=is_leaving)
        app = _app(settings, dispatcher, streams, watches, directory)
        http_server = _http_server(app, settings, keys, tracing, is_leaving)
        await rpc_server.start()
        http_serving = tasks.create_task(http_server.serve([listener]))
        background.append(tasks.create_task(_follow_readiness(dispatcher, rpc_server, news)))
        http_port = listener.getsockname()[1]
        logger.info("gateway_started", http_port=http_port, grpc_port=rpc_server.port)
        try:
            with _gauges(fleet.links, dispatcher):
                yield Gateway(
                    dispatcher=dispatcher,
                    pacer=pacer,
                    streams=streams,
                    http_port=http_port,
                    grpc_port=rpc_server.port,
                )
        finally:
            await _leave(dispatcher, rpc_server, settings.lame_duck_s)
            await _drain(dispatcher, rpc_server, settings.drain_timeout_s)
            http_server.should_exit = True
            await http_serving
            for task in background:
                task.cancel()
            await asyncio.to_thread(tracing.close)


@contextmanager
def _gauges(links: Mapping[str, ExecutorLink], dispatcher: Dispatcher) -> Iterator[None]:
    """Have `/metrics` tell of executors while the block runs."""

    def in_hand() -> list[InHand]:
        return [
            InHand(
                live.route.link.address,
                live.generation.request.model,
                has_tokens=live.generation.num_generated > 0,
            )
            for live in dispatcher.live_requests()
            if live.route is not None
        ]

    gauges = ExecutorGauges(links, in_hand, wall_clock=clock.wall_s)
    REGISTRY.register(gauges)
    try:
        yield
    finally:
        REGISTRY.unregister(gauges)


def _limits(settings: GatewaySettings) -> DispatchLimits:
    return DispatchLimits(
        max_live_requests=settings.max_live_requests,
        submit_timeout_s=settings.submit_timeout_s,
        readers=ReaderLimits(
            max_undelivered_tokens=settings.max_undelivered_tokens,
            max_deposit_bytes=settings.max_deposit_bytes,
            max_pace_tail_s=settings.max_pace_tail_s,
            max_kept_tokens=settings.failover_max_tokens if settings.failover_timeout_s else 0,
        ),
        failover=FailoverLimits(
            timeout_s=settings.failover_timeout_s,
            max_kept_tokens=settings.failover_max_tokens,
            across_numerics=settings.failover_across_numerics,
            num_overlap=settings.failover_overlap_tokens,
        ),
        reader_timeout_s=settings.reader_timeout_s,
        slo_floors=settings.slo_floors,
        reading_rates_tps=settings.default_reading_rate_tps,
    )


def _streams(settings: GatewaySettings, dispatcher: Dispatcher) -> ResumableStreams:
    limits = ResumeLimits(
        window_s=settings.resume_window_s,
        reader_timeout_s=settings.reader_timeout_s,
        max_bytes=settings.resume_max_bytes,
    )
    return ResumableStreams(dispatcher, limits, clock=clock.monotonic_s)


def _rpc_server(
    settings: GatewaySettings, servicer: GatewayServicer, keys: ApiKeys
) -> ServiceServer:
    server = ServiceServer(
        f"{settings.host}:{settings.grpc_port}",
        [SERVICE_NAME],
        transport=settings.edge_transport,
        interceptors=[GrpcGuard(keys)],
        max_calls=CALLS_PER_LIVE_REQUEST * settings.max_live_requests,
    )
    pb_grpc.add_GatewayServiceServicer_to_server(servicer, server.grpc)
    return server


def _app(
    settings: GatewaySettings,
    dispatcher: Dispatcher,
    streams: ResumableStreams,
    watches: Watches,
    directory: TrackerDirectory | None,
) -> FastAPI:
    app = make_app(dispatcher, streams, watches, directory, keepalive_s=settings.sse_keepalive_s)
    if settings.ui:
        add_page(app)
        add_sizing(app, dispatcher)
    return app


def _http_server(
    app: FastAPI,
    settings: GatewaySettings,
    keys: ApiKeys,
    tracing: Tracing,
    is_leaving: Callable[[], bool],
) -> _HttpServer:
    guarded = allow_origins(HttpGuard(app, keys, settings.hosts), settings.cors_origins)
    edge = HttpEdge(guarded, tracing, is_leaving=is_leaving)
    return _HttpServer(_http_config(edge, settings))


def _fleet(
    settings: GatewaySettings, directory: TrackerDirectory | None, news: asyncio.Event
) -> Fleet:
    options = LinkOptions(
        gateway_id=settings.name,
        transport=settings.transport,
        stalls=StallLimits(link_s=settings.link_stall_s, engine_s=settings.engine_stall_s),
    )

    def make_link(place: Place) -> ExecutorLink:
        transport = replace(options.transport, server_name=place.server_name)
        own = replace(options, transport=transport)
        return ExecutorLink(place.address, own, clock=clock.monotonic_s, changed=news.set)

    names = settings.executor_names
    sources: list[Source] = [
        DnsSource(host, port, resolver=discovery.resolve) for host, port in names
    ]
    if settings.asks_tracker and directory is not None:
        sources.append(directory)
    return Fleet(settings.executor_addresses, sources, make_link=make_link, changed=news.set)


async def _follow_readiness(
    dispatcher: Dispatcher, rpc_server: ServiceServer, news: asyncio.Event
) -> None:
    """Have gRPC's health say what `/ready` says, until cancelled."""
    is_serving = False
    while True:
        if dispatcher.is_ready is not is_serving:
            is_serving = dispatcher.is_ready
            await rpc_server.mark_serving(is_serving=is_serving)
        await news.wait()
        news.clear()


def _key_source(settings: GatewaySettings) -> KeySource | None:
    if settings.api_keys_file is not None:
        return FileKeys(settings.api_keys_file)
    if settings.api_keys_redis_url is not None:
        return RedisKeys(settings.api_keys_redis_url.get_secret_value())
    return None


async def _leave(dispatcher: Dispatcher, rpc_server: ServiceServer, lame_duck_s: float) -> None:
    """Serve for a while without being ready, so that load balancers notice before calls fail."""
    dispatcher.start_leaving()
    await rpc_server.mark_leaving()
    logger.info("leaving", lame_duck_s=lame_duck_s)
    await sleep(lame_duck_s)


async def _drain(dispatcher: Dispatcher, rpc_server: ServiceServer, timeout_s: float) -> None:
    """Refuse new requests; let live ones end, with an error if they take longer than the timeout.

    HTTP goes on answering probes and refusing requests meanwhile.
    """
    dispatcher.start_draining()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rpc_server.drain(timeout_s + CLOSE_MARGIN_S))
        try:
            async with asyncio.timeout(timeout_s):
                await dispatcher.wait_idle()
        except TimeoutError:
            logger.warning("drain_timed_out", num_live_requests=dispatcher.num_live)
            dispatcher.fail_all()


@asynccontextmanager
async def _tracker(
    settings: GatewaySettings,
) -> AsyncIterator[tuple[TrackerDirectory | None, DeliveryReports]]:
    """Report to the tracker, if there is one, while the block runs; afterwards send what is left.
    Yields what it can be asked, and where reports go.
    """
    if not settings.tracker:
        yield None, NoReports()
        return
    sender = Sender(kind=SenderKind.GATEWAY, id=settings.name, epoch=clock.process_epoch())
    async with make_channel(settings.tracker, transport=settings.transport) as channel:
        stub: TrackerServiceAsyncStub = TrackerServiceStub(channel)
        reporter = TrackerReporter(stub, sender=sender)
        async with asyncio.TaskGroup() as tasks:
            reporting = tasks.create_task(reporter.run())
            try:
                yield TrackerDirectory(stub), reporter
            finally:
                reporting.cancel()
        await reporter.flush(settings.tracker_flush_timeout_s)


def _http_config(app: HttpEdge, settings: GatewaySettings) -> uvicorn.Config:
    certificates = settings.edge_transport.certificates
    tls: dict[str, Any] = {}
    if certificates is not None:
        tls |= {"ssl_certfile": certificates.cert_file, "ssl_keyfile": certificates.key_file}
        if certificates.ca_file:
            tls |= {"ssl_ca_certs": certificates.ca_file, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    limits = ConnectionLimits(
        head_timeout_s=settings.http_head_timeout_s,
        body_timeout_s=settings.http_body_timeout_s,
        reader_timeout_s=2 * settings.reader_timeout_s,  # what ends the answer is to be read too
        max_connections=settings.max_connections,
        max_connections_per_address=settings.max_connections_per_address,
    )
    protocol: Any = partial(BoundedHttpProtocol, connections=Connections(limits))
    config = uvicorn.Config(
        app,
        http=protocol,
        timeout_keep_alive=math.ceil(settings.http_idle_timeout_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_MARGIN_S,
        **tls,
    )
    if certificates is not None:
        config.load()
        assert config.ssl is not None
        renew_with_files(config.ssl, certificates)
    return config


def _listen(host: str, port: int) -> socket.socket:
    """Open the HTTP port (0 picks one). Raises OSError if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    # Connections inherit it; asyncio itself leaves it off for a socket made like this one.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    listener.setblocking(False)
    return listener


def _call_later(delay_s: float, callback: Callable[[], None]) -> TimerHandle:
    """Call back after at least `delay_s`; uvloop's timers count whole milliseconds."""
    return asyncio.get_running_loop().call_later(math.ceil(delay_s * 1e3) / 1e3, callback)


async def serve(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    stop = stop_event()
    metrics_port = metrics.start_endpoint(settings.host, settings.metrics_port)
    logger.info("metrics_started", port=metrics_port)
    async with run_gateway(settings):
        gc.collect()
        gc.freeze()  # or each full collection walks what was imported, while tokens are due
        gc.set_threshold(*GC_THRESHOLDS)
        await stop.wait()


def require_one_master(settings: GatewaySettings) -> None:
    """Stop the process if the Redis of its keys is found to be a cluster of several."""
    if settings.api_keys_redis_url is None:
        return
    url = settings.api_keys_redis_url.get_secret_value()
    if refusal := refusal_of_cluster(url, timeout_s=REDIS_TIMEOUT_S):
        refuse(f"EVENFLOW_GATEWAY_API_KEYS_REDIS_URL: {refusal}")


def main() -> None:
    settings = load(GatewaySettings)
    log.configure("gateway", settings.log_level)
    require_one_master(settings)
    uvloop.run(serve(settings))
