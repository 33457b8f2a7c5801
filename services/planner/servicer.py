"""gRPC edge of the planner: convert, delegate. No state."""

from collections.abc import Mapping

import structlog

from evenflow.planner.v1 import planner_pb2 as pb
from evenflow.planner.v1 import planner_pb2_grpc as pb_grpc
from services.kit.rpc import Context
from services.placement.policies import Policy
from services.planner import convert
from services.planner.metrics import PLANS

log = structlog.get_logger()


class PlannerServicer(pb_grpc.PlannerServiceServicer):
    def __init__(self, policies: Mapping[str, Policy]) -> None:
        self._policies = policies

    async def Plan(self, request: pb.PlanRequest, context: Context) -> pb.PlanResponse:
        snapshot = convert.snapshot_from_proto(request, known_policies=self._policies.keys())

        plan = self._policies[snapshot.policy](snapshot)

        PLANS.labels(plan.policy, plan.status.value).inc()
        log.debug("plan_made", epoch=plan.epoch, policy=plan.policy, status=plan.status.value)
        return pb.PlanResponse(plan=convert.plan_to_proto(plan))
