"""Requests and plans on the wire. Beside the servicer and the log the only one here that knows pb2.

Every range is checked as a snapshot is read, and the parts against each other by
`find_contradiction`, so that policies meet sound snapshots only. The limits on counts keep a
hostile snapshot from costing more than a large honest one.
"""

from collections.abc import Iterable
from enum import Enum

from evenflow.planner.v1 import planner_pb2 as pb
from services.kit.errors import InvalidRequestError
from services.kit.wire import fail, read_part, write
from services.placement.judging.contradiction import find_contradiction
from services.placement.policies import NEEDED_FIELDS
from services.placement.presets import (
    PRESETS,
    AdmissionPolicy,
    PlacementPolicy,
    RunPolicy,
    resolved,
)
from services.placement.ranges import MAX_SECONDS
from services.placement.types import Plan, PolicyParameters, Snapshot

MAX_GROUPS = 192  # tables of the solver grow with the cube of it
AXES: dict[str, type[Enum]] = {
    "placement_policy": PlacementPolicy,
    "run_policy": RunPolicy,
    "admission_policy": AdmissionPolicy,
}


def budget_from_proto(request: pb.PlanRequest) -> float | None:
    """Return the search time a request asks for. Raises InvalidRequestError."""
    if request.HasField("time_budget_s") and not 0.0 < request.time_budget_s < MAX_SECONDS:
        raise InvalidRequestError(
            f"time_budget_s: {request.time_budget_s} is not in (0, {MAX_SECONDS})",
            field="time_budget_s",
        )
    return request.time_budget_s if request.HasField("time_budget_s") else None


def snapshot_from_proto(request: pb.PlanRequest) -> Snapshot:
    """Return the snapshot of a request. Raises InvalidRequestError naming the field at fault."""
    snapshot = read_part(Snapshot, request, "snapshot")
    _check_choice("snapshot.policy", snapshot.policy, PRESETS)
    _check_axes(snapshot.parameters)
    _check_together(snapshot)
    return snapshot


def _check_axes(parameters: PolicyParameters) -> None:
    for name, axis in AXES.items():
        if value := getattr(parameters, name):
            _check_choice(f"snapshot.parameters.{name}", value, [one.value for one in axis])


def _check_choice(path: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        fail(path, f"unknown, not one of {', '.join(sorted(known))}")


def _check_together(snapshot: Snapshot) -> None:
    contradiction = find_contradiction(snapshot)
    if contradiction is not None:
        fail(f"snapshot.{contradiction.field}", contradiction.message)
    if snapshot.engine.num_groups > MAX_GROUPS:
        fail("snapshot.engine.layers_per_group", f"gives more than {MAX_GROUPS} layer groups")
    preset, _ = resolved(snapshot)
    for name in NEEDED_FIELDS.get(preset.placement, ()):
        if getattr(snapshot, name) is None:
            fail(f"snapshot.{name}", f"is required by placement policy {preset.placement.value}")


def plan_to_proto(plan: Plan) -> pb.Plan:
    return write(plan, pb.Plan)
