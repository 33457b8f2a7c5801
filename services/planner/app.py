"""Composition root of the planner."""

import asyncio

import structlog

from evenflow.planner.v1 import planner_pb2 as pb
from evenflow.planner.v1 import planner_pb2_grpc as pb_grpc
from services.kit import log, metrics
from services.kit.server import ServiceServer, run_until_stopped, stop_event
from services.kit.settings import load
from services.placement.policies import POLICIES
from services.planner.servicer import PlannerServicer
from services.planner.settings import PlannerSettings

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["PlannerService"].full_name

logger = structlog.get_logger()


async def serve(settings: PlannerSettings) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    stop = stop_event()
    server = ServiceServer(f"{settings.host}:{settings.grpc_port}", [SERVICE_NAME])
    pb_grpc.add_PlannerServiceServicer_to_server(PlannerServicer(POLICIES), server.grpc)
    metrics_port = metrics.start_endpoint(settings.host, settings.metrics_port)
    logger.info("metrics_started", port=metrics_port)
    await server.start()
    await run_until_stopped(server, stop=stop, drain_timeout_s=settings.drain_timeout_s)


def main() -> None:
    settings = load(PlannerSettings)
    log.configure("planner", settings.log_level)
    asyncio.run(serve(settings))
