"""Composition root of the tracker."""

import asyncio

import structlog

from evenflow.tracker.v1 import tracker_pb2 as pb
from evenflow.tracker.v1 import tracker_pb2_grpc as pb_grpc
from services.kit.clock import wall_s
from services.kit.redis_url import refusal_of_cluster
from services.kit.server import ServiceServer, run_until_stopped, stop_event
from services.kit.settings import load, refuse
from services.kit.telemetry import log, metrics
from services.tracker.redis.store import RedisTrackerStore
from services.tracker.servicer import TrackerServicer
from services.tracker.settings import TrackerSettings
from services.tracker.types import Lifetimes

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["TrackerService"].full_name

logger = structlog.get_logger()


async def serve(settings: TrackerSettings) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Needs no Redis to start or to go on serving."""
    stop = stop_event()
    lifetimes = Lifetimes(
        lease_ttl_s=settings.lease_ttl_s,
        request_ttl_s=settings.request_ttl_s,
        retention_s=settings.retention_s,
    )
    url = settings.redis_url.get_secret_value()
    store = RedisTrackerStore(url, lifetimes, clock=wall_s, timeout_s=settings.redis_timeout_s)
    servicer = TrackerServicer(store, lease_ttl_s=settings.lease_ttl_s, clock=wall_s)
    server = ServiceServer(
        f"{settings.host}:{settings.grpc_port}", [SERVICE_NAME], transport=settings.transport
    )
    pb_grpc.add_TrackerServiceServicer_to_server(servicer, server.grpc)
    metrics_port = metrics.start_endpoint(settings.host, settings.metrics_port)
    logger.info("metrics_started", port=metrics_port)

    await server.start()
    await run_until_stopped(server, stop=stop, drain_timeout_s=settings.drain_timeout_s)
    await store.aclose()


def require_one_master(settings: TrackerSettings) -> None:
    """Stop the process if its Redis is found to be a cluster of several."""
    url = settings.redis_url.get_secret_value()
    if refusal := refusal_of_cluster(url, timeout_s=settings.redis_timeout_s):
        refuse(f"EVENFLOW_TRACKER_REDIS_URL: {refusal}")


def main() -> None:
    settings = load(TrackerSettings)
    log.configure("tracker", settings.log_level)
    require_one_master(settings)
    asyncio.run(serve(settings))
