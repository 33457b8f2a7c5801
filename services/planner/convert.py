"""Protobuf <-> domain. The only planner module besides the servicer that imports pb2.

Every range is checked here, and the parts against each other by `find_contradiction`, so that
policies meet sound snapshots only. The limits on counts keep a hostile snapshot from costing more
than a large honest one.
"""

from collections.abc import Collection

from evenflow.planner.v1 import planner_pb2 as pb
from services.kit.errors import InvalidRequestError
from services.placement.contradiction import find_contradiction
from services.placement.types import (
    EngineShape,
    Plan,
    PlanStatus,
    RequestId,
    RequestPhase,
    RequestState,
    Snapshot,
)
from services.planner.fields import Fields

MAX_LAYERS = 1_024
MAX_REQUESTS = 4_096
MAX_BLOCKS = 2**40
MAX_ID_LENGTH = 256

_PHASES = {
    pb.REQUEST_PHASE_WAITING: RequestPhase.WAITING,
    pb.REQUEST_PHASE_PREFILL: RequestPhase.PREFILL,
    pb.REQUEST_PHASE_DECODING: RequestPhase.DECODING,
    pb.REQUEST_PHASE_PAUSED: RequestPhase.PAUSED,
    pb.REQUEST_PHASE_PREEMPTED: RequestPhase.PREEMPTED,
}
_STATUSES = {
    PlanStatus.OPTIMAL: pb.PLAN_STATUS_OPTIMAL,
    PlanStatus.FEASIBLE: pb.PLAN_STATUS_FEASIBLE,
    PlanStatus.INFEASIBLE: pb.PLAN_STATUS_INFEASIBLE,
    PlanStatus.UNDECIDED: pb.PLAN_STATUS_UNDECIDED,
}


def snapshot_from_proto(request: pb.PlanRequest, *, known_policies: Collection[str]) -> Snapshot:
    """Return the snapshot of a request. Raises InvalidRequestError naming the field at fault."""
    if not request.HasField("snapshot"):
        raise InvalidRequestError("snapshot: is required", field="snapshot")
    message = request.snapshot
    fields = Fields(message, "snapshot")
    policy = fields.text("policy", max_length=MAX_ID_LENGTH)
    if policy not in known_policies:
        fields.fail("policy", f"unknown, not one of {', '.join(sorted(known_policies))}")
    if not message.HasField("engine"):
        fields.fail("engine", "is required")
    if len(message.requests) > MAX_REQUESTS:
        fields.fail("requests", f"has more than {MAX_REQUESTS} entries")
    snapshot = Snapshot(
        epoch=fields.integer("epoch", low=1, high=2**63 - 1),
        policy=policy,
        seed=message.seed,
        engine=_engine_from_proto(Fields(message.engine, "snapshot.engine")),
        requests=tuple(
            _request_from_proto(entry, f"snapshot.requests[{index}]")
            for index, entry in enumerate(message.requests)
        ),
        num_free_blocks=fields.integer("num_free_blocks", high=MAX_BLOCKS),
    )
    contradiction = find_contradiction(snapshot)
    if contradiction is not None:
        fields.fail(contradiction.field, contradiction.message)
    return snapshot


def _engine_from_proto(fields: Fields) -> EngineShape:
    return EngineShape(
        num_layers=fields.integer("num_layers", low=1, high=MAX_LAYERS),
        layers_per_group=fields.integer("layers_per_group", low=1, high=MAX_LAYERS),
        block_size=fields.integer("block_size", low=1),
        num_blocks=fields.integer("num_blocks", low=1, high=MAX_BLOCKS),
        block_bytes=fields.integer("block_bytes", low=1, high=MAX_BLOCKS),
        max_num_seqs=fields.integer("max_num_seqs", low=1),
        max_num_batched_tokens=fields.integer("max_num_batched_tokens", low=1),
    )


def _request_from_proto(message: pb.RequestState, path: str) -> RequestState:
    fields = Fields(message, path)
    phase = _PHASES.get(message.phase)
    if phase is None:
        fields.fail("phase", f"unknown value {message.phase}")
    return RequestState(
        request_id=RequestId(fields.text("request_id", max_length=MAX_ID_LENGTH)),
        phase=phase,
        num_prompt_tokens=fields.integer("num_prompt_tokens", low=1),
        num_output_tokens=fields.integer("num_output_tokens"),
        num_computed_tokens=fields.integer("num_computed_tokens"),
        num_deposited_tokens=fields.integer("num_deposited_tokens"),
        arrival_age_s=fields.number("arrival_age_s"),
        first_token_age_s=fields.optional_number("first_token_age_s"),
        slo_ttft_s=fields.optional_positive("slo_ttft_s"),
        slo_tpot_s=fields.optional_positive("slo_tpot_s"),
        slo_tbt_s=fields.optional_positive("slo_tbt_s"),
        consumption_rate_tps=fields.optional_positive("consumption_rate_tps"),
        offloaded_layers=fields.integers("offloaded_layers", max_count=MAX_LAYERS),
    )


def plan_to_proto(plan: Plan) -> pb.Plan:
    return pb.Plan(
        epoch=plan.epoch,
        policy=plan.policy,
        status=_STATUSES[plan.status],
        placements=[
            pb.Placement(
                request_id=placement.request_id,
                offloaded_layers=placement.offloaded_layers,
                paused=placement.paused,
            )
            for placement in plan.placements
        ],
    )
