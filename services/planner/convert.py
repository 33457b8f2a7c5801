"""Requests and plans on the wire. Beside the servicer and the log the only one here that knows pb2.

Every range is checked as a snapshot is read, and the parts against each other by
`find_contradiction`, so that policies meet sound snapshots only. The limits on counts keep a
hostile snapshot from costing more than a large honest one.
"""

from collections.abc import Collection

from evenflow.planner.v1 import planner_pb2 as pb
from services.kit.errors import InvalidRequestError
from services.kit.wire import fail, read_part, write
from services.placement.judging.contradiction import find_contradiction
from services.placement.presets import PRESETS, preset_of
from services.placement.ranges import MAX_SECONDS
from services.placement.types import Plan, Snapshot

MAX_GROUPS = 192  # tables of the solver grow with the cube of it


def budget_from_proto(request: pb.PlanRequest) -> float | None:
    """Return the search time a request asks for. Raises InvalidRequestError."""
    if request.HasField("time_budget_s") and not 0.0 < request.time_budget_s < MAX_SECONDS:
        raise InvalidRequestError(
            f"time_budget_s: {request.time_budget_s} is not in (0, {MAX_SECONDS})",
            field="time_budget_s",
        )
    return request.time_budget_s if request.HasField("time_budget_s") else None


def snapshot_from_proto(request: pb.PlanRequest, more: Collection[str] = ()) -> Snapshot:
    """Return the snapshot of a request. Raises InvalidRequestError naming the field at fault.

    `more`: policies that it may name beside the presets. No other is imported for a peer.
    """
    snapshot = read_part(Snapshot, request, "snapshot")
    known = (*PRESETS, *more)
    if snapshot.policy not in known:
        fail("snapshot.policy", f"unknown, not one of {', '.join(sorted(known))}")
    _check_together(snapshot)
    return snapshot


def _check_together(snapshot: Snapshot) -> None:
    contradiction = find_contradiction(snapshot)
    if contradiction is not None:
        fail(f"snapshot.{contradiction.field}", contradiction.message)
    if snapshot.engine.num_groups > MAX_GROUPS:
        fail("snapshot.engine.layers_per_group", f"gives more than {MAX_GROUPS} layer groups")
    for name in preset_of(snapshot.policy).placing.needs:
        if getattr(snapshot, name) is None:
            fail(f"snapshot.{name}", f"is required by policy {snapshot.policy}")


def plan_to_proto(plan: Plan) -> pb.Plan:
    return write(plan, pb.Plan)
