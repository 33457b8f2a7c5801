"""gRPC edge of the planner: convert, delegate. No state."""

import math
from collections.abc import Collection

import structlog

from evenflow.planner.v1 import planner_pb2 as pb
from evenflow.planner.v1 import planner_pb2_grpc as pb_grpc
from services.kit.rpc import Context, timeout_s
from services.planner import convert
from services.planner.decision_log import DecisionLog
from services.planner.metrics import GAP, PAUSES, PLANS
from services.planner.worker import Worker

log = structlog.get_logger()


class PlannerServicer(pb_grpc.PlannerServiceServicer):
    def __init__(
        self, worker: Worker, decisions: DecisionLog, policies: Collection[str] = ()
    ) -> None:
        """`policies`: that a snapshot may name beside the presets."""
        self._worker, self._decisions, self._policies = worker, decisions, policies

    async def Plan(self, request: pb.PlanRequest, context: Context) -> pb.PlanResponse:
        snapshot = convert.snapshot_from_proto(request, self._policies)
        asked_s = convert.budget_from_proto(request)

        plan = await self._worker.plan(snapshot, budget_s=timeout_s(asked_s or math.inf))

        PLANS.labels(plan.policy, plan.status.value).inc()
        PAUSES.labels(plan.policy).inc(sum(placement.paused for placement in plan.placements))
        if plan.quality is not None:
            GAP.labels(plan.policy).observe(plan.quality.gap_frac)
        log.debug("plan_made", epoch=plan.epoch, policy=plan.policy, status=plan.status.value)
        message = convert.plan_to_proto(plan)
        self._decisions.append(request.snapshot, message)
        return pb.PlanResponse(plan=message)
