"""Composition root of the planner."""

import asyncio
import os
import sys
from pathlib import Path

import structlog

from evenflow.planner.v1 import planner_pb2 as pb
from evenflow.planner.v1 import planner_pb2_grpc as pb_grpc
from services.kit import clock
from services.kit.server import ServiceServer, run_until_stopped, stop_event
from services.kit.settings import load
from services.kit.telemetry import log, metrics
from services.planner.decision_log import DecisionLog
from services.planner.policy.orbitflow import OrbitFlow
from services.planner.replay import replay
from services.planner.servicer import PlannerServicer
from services.planner.settings import PlannerSettings
from services.planner.solver.solver import warm_solver
from services.planner.worker import Worker

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["PlannerService"].full_name
USAGE = "usage: python -m services.planner [replay FILE]"

logger = structlog.get_logger()


async def serve(settings: PlannerSettings) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    stop = stop_event()
    decisions = DecisionLog(settings.decision_log)
    worker = Worker(clock.monotonic_s, max_budget_s=settings.budget_s)
    server = ServiceServer(
        f"{settings.host}:{settings.grpc_port}", [SERVICE_NAME], transport=settings.transport
    )
    pb_grpc.add_PlannerServiceServicer_to_server(
        PlannerServicer(worker, decisions, settings.policies), server.grpc
    )
    metrics_port = metrics.start_endpoint(settings.host, settings.metrics_port)
    logger.info("metrics_started", port=metrics_port)
    worker.warm_up(settings.warm_groups)
    await server.start()
    await run_until_stopped(server, stop=stop, drain_timeout_s=settings.drain_timeout_s)
    decisions.close()
    if not worker.close():
        os._exit(0)  # in the middle of a compilation: nothing else is left to do


def main() -> None:
    """Serve, or replay a decision log: exit code 1 if a plan is not reproduced."""
    settings = load(PlannerSettings)
    match sys.argv[1:]:
        case []:
            log.configure("planner", settings.log_level)
            asyncio.run(serve(settings))
        case ["replay", path]:
            different = replay(Path(path), OrbitFlow(warm_solver), settings.policies)
            sys.exit(int(different > 0))
        case _:
            sys.exit(USAGE)
