"""Protobuf <-> domain. The only planner module besides the servicer and the log that imports pb2.

Every range is checked here, and the parts against each other by `find_contradiction`, so that
policies meet sound snapshots only. The limits on counts keep a hostile snapshot from costing more
than a large honest one.
"""

from evenflow.planner.v1 import planner_pb2 as pb
from services.kit.errors import InvalidRequestError
from services.placement.contradiction import find_contradiction
from services.placement.policies import NEEDED_FIELDS
from services.placement.presets import (
    PRESETS,
    AdmissionPolicy,
    PlacementPolicy,
    RunPolicy,
    resolved,
)
from services.placement.types import (
    BufferMode,
    EngineShape,
    Link,
    ModelShape,
    Placement,
    Plan,
    PlanStatus,
    PolicyParameters,
    Profile,
    Quality,
    RequestId,
    RequestPhase,
    RequestState,
    Snapshot,
    VictimRule,
)
from services.planner.fields import MAX_SECONDS, Fields

MAX_LAYERS = 1_024
MAX_GROUPS = 192  # tables of the solver grow with the cube of it
MAX_REQUESTS = 1_024
MAX_BLOCKS = 2**40
MAX_WINDOW = 4_096
MAX_RATE = 1e15
MAX_FLOPS_PER_S = 1e21
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
_VICTIM_RULES = {
    pb.VICTIM_RULE_UNSPECIFIED: None,
    pb.VICTIM_RULE_KV_AND_DEPOSIT: VictimRule.KV_AND_DEPOSIT,
    pb.VICTIM_RULE_LONGEST: VictimRule.LONGEST,
    pb.VICTIM_RULE_SHORTEST: VictimRule.SHORTEST,
    pb.VICTIM_RULE_RANDOM: VictimRule.RANDOM,
    pb.VICTIM_RULE_SMALLEST_SET: VictimRule.SMALLEST_SET,
}
_BUFFER_MODES = {
    pb.BUFFER_MODE_UNSPECIFIED: BufferMode.PRIVATE,
    pb.BUFFER_MODE_PRIVATE: BufferMode.PRIVATE,
    pb.BUFFER_MODE_EQ1: BufferMode.EQ1,
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
    if not request.HasField("snapshot"):
        raise InvalidRequestError("snapshot: is required", field="snapshot")
    message = request.snapshot
    fields = Fields(message, "snapshot")
    if not message.HasField("engine"):
        fields.fail("engine", "is required")
    if len(message.requests) > MAX_REQUESTS:
        fields.fail("requests", f"has more than {MAX_REQUESTS} entries")
    snapshot = Snapshot(
        epoch=fields.integer("epoch", low=1, high=2**63 - 1),
        policy=fields.choice("policy", PRESETS.keys()),
        seed=message.seed,
        engine=_engine_from_proto(message.engine),
        requests=tuple(
            _request_from_proto(entry, f"snapshot.requests[{index}]")
            for index, entry in enumerate(message.requests)
        ),
        num_free_blocks=fields.integer("num_free_blocks", high=MAX_BLOCKS),
        num_free_host_blocks=fields.integer("num_free_host_blocks", high=MAX_BLOCKS),
        num_free_staging_blocks=fields.integer("num_free_staging_blocks", high=MAX_BLOCKS),
        last_completion_age_s=fields.optional_seconds("last_completion_age_s"),
        h2d=_link_from_proto(message, "h2d"),
        d2h=_link_from_proto(message, "d2h"),
        profile=_profile_from_proto(message),
        parameters=_parameters_from_proto(message.parameters),
        num_write_through_blocks=fields.integer("num_write_through_blocks", high=MAX_BLOCKS),
    )
    _check_together(snapshot, fields)
    return snapshot


def _check_together(snapshot: Snapshot, fields: Fields) -> None:
    contradiction = find_contradiction(snapshot)
    if contradiction is not None:
        fields.fail(contradiction.field, contradiction.message)
    if snapshot.engine.num_groups > MAX_GROUPS:
        fields.fail("engine.layers_per_group", f"gives more than {MAX_GROUPS} layer groups")
    preset, _ = resolved(snapshot)
    for name in NEEDED_FIELDS.get(preset.placement, ()):
        if getattr(snapshot, name) is None:
            fields.fail(name, f"is required by placement policy {preset.placement.value}")


def _engine_from_proto(message: pb.EngineShape) -> EngineShape:
    fields = Fields(message, "snapshot.engine")
    return EngineShape(
        num_layers=fields.integer("num_layers", low=1, high=MAX_LAYERS),
        layers_per_group=fields.integer("layers_per_group", low=1, high=MAX_LAYERS),
        block_size=fields.integer("block_size", low=1),
        num_blocks=fields.integer("num_blocks", low=1, high=MAX_BLOCKS),
        block_bytes=fields.integer("block_bytes", low=1, high=MAX_BLOCKS),
        max_num_seqs=fields.integer("max_num_seqs", low=1),
        max_num_batched_tokens=fields.integer("max_num_batched_tokens", low=1),
        num_host_blocks=fields.integer("num_host_blocks", high=MAX_BLOCKS),
        max_model_len=fields.integer("max_model_len"),
        max_prefill_chunk_tokens=fields.integer("max_prefill_chunk_tokens"),
        model=_model_from_proto(message.model),
    )


def _model_from_proto(message: pb.ModelShape) -> ModelShape:
    fields = Fields(message, "snapshot.engine.model")
    return ModelShape(
        num_parameters=fields.integer("num_parameters", high=2**63 - 1),
        hidden_size=fields.integer("hidden_size"),
        num_kv_heads=fields.integer("num_kv_heads"),
        head_size=fields.integer("head_size"),
        tensor_parallel_size=fields.integer("tensor_parallel_size") or 1,
        pipeline_parallel_size=fields.integer("pipeline_parallel_size") or 1,
        vocab_size=fields.integer("vocab_size"),
        num_weight_bytes=fields.integer("num_weight_bytes", high=2**63 - 1),
    )


def _link_from_proto(snapshot: pb.Snapshot, name: str) -> Link | None:
    if not snapshot.HasField(name):  # type: ignore[arg-type]
        return None
    fields = Fields(getattr(snapshot, name), f"snapshot.{name}")
    return Link(
        bytes_per_s=fields.positive("bytes_per_s", low=1.0, high=MAX_RATE),
        copy_overhead_s=fields.seconds("copy_overhead_s"),
        chunk_bytes=fields.integer("chunk_bytes", low=1, high=MAX_BLOCKS),
        num_queued_bytes=fields.integer("num_queued_bytes", high=2**62),
        peak_bytes_per_s=fields.optional_positive("peak_bytes_per_s", low=1.0, high=MAX_RATE),
    )


def _profile_from_proto(snapshot: pb.Snapshot) -> Profile | None:
    if not snapshot.HasField("profile"):
        return None
    fields = Fields(snapshot.profile, "snapshot.profile")
    return Profile(
        outside_layers_s=fields.seconds("outside_layers_s"),
        layer_base_s=fields.positive("layer_base_s", low=1e-9, high=MAX_SECONDS),
        layer_s_per_token=fields.seconds("layer_s_per_token"),
        layer_s_per_context_token=fields.seconds("layer_s_per_context_token"),
        prefill_s_per_token=fields.seconds("prefill_s_per_token"),
        mean_tpot_s=fields.seconds("mean_tpot_s"),
        capacity_tps=fields.number("capacity_tps", high=MAX_RATE),
        peak_flops_per_s=fields.number("peak_flops_per_s", high=MAX_FLOPS_PER_S),
    )


def _parameters_from_proto(message: pb.PolicyParameters) -> PolicyParameters:
    fields = Fields(message, "snapshot.parameters")
    default = PolicyParameters()
    return PolicyParameters(
        placement_policy=fields.optional_choice(
            "placement_policy", [policy.value for policy in PlacementPolicy]
        ),
        run_policy=fields.optional_choice("run_policy", [policy.value for policy in RunPolicy]),
        admission_policy=fields.optional_choice(
            "admission_policy", [policy.value for policy in AdmissionPolicy]
        ),
        deposit=message.deposit if message.HasField("deposit") else None,
        pause=message.pause if message.HasField("pause") else None,
        alpha=fields.number("alpha", high=MAX_REQUESTS, default=default.alpha),
        min_window=fields.integer("min_window", low=1, high=MAX_WINDOW, default=default.min_window),
        max_window=fields.integer("max_window", low=1, high=MAX_WINDOW, default=default.max_window),
        min_pause_s=fields.number("min_pause_s", high=MAX_SECONDS, default=default.min_pause_s),
        max_pause_s=fields.number("max_pause_s", high=MAX_SECONDS, default=default.max_pause_s),
        victim_rule=fields.enum("victim_rule", _VICTIM_RULES),
        buffer_mode=fields.enum("buffer_mode", _BUFFER_MODES),
        even_patterns_only=message.even_patterns_only,
        overlap=not message.no_overlap,
        slo_aware=not message.no_slo_admission,
    )


def _request_from_proto(message: pb.RequestState, path: str) -> RequestState:
    fields = Fields(message, path)
    return RequestState(
        request_id=RequestId(fields.text("request_id", max_length=MAX_ID_LENGTH)),
        phase=fields.enum("phase", _PHASES),
        num_prompt_tokens=fields.integer("num_prompt_tokens", low=1),
        num_output_tokens=fields.integer("num_output_tokens"),
        num_computed_tokens=fields.integer("num_computed_tokens"),
        num_deposited_tokens=fields.integer("num_deposited_tokens"),
        arrival_age_s=fields.number("arrival_age_s"),
        first_token_age_s=fields.optional_number("first_token_age_s"),
        last_release_age_s=fields.optional_seconds("last_release_age_s"),
        paused_age_s=fields.optional_number("paused_age_s"),
        resumed_age_s=fields.optional_number("resumed_age_s"),
        num_pauses=fields.integer("num_pauses"),
        slo_ttft_s=fields.optional_positive("slo_ttft_s"),
        slo_tpot_s=fields.optional_positive("slo_tpot_s", low=1e-9, high=MAX_SECONDS),
        slo_tbt_s=fields.optional_positive("slo_tbt_s", low=1e-9, high=MAX_SECONDS),
        consumption_rate_tps=fields.optional_positive("consumption_rate_tps"),
        priority=message.priority,
        predicted_min_output_tokens=fields.optional_integer("predicted_min_output_tokens"),
        predicted_max_output_tokens=fields.optional_integer("predicted_max_output_tokens"),
        offloaded_layers=fields.integers("offloaded_layers", max_count=MAX_LAYERS),
        num_prefetch_buffers=fields.integer("num_prefetch_buffers", high=MAX_LAYERS),
        num_blocks=fields.integers("num_blocks", max_count=MAX_LAYERS, high=MAX_BLOCKS),
        num_host_blocks=fields.integers("num_host_blocks", max_count=MAX_LAYERS, high=MAX_BLOCKS),
        on_hold=message.on_hold,
        num_preemptions=fields.integer("num_preemptions"),
        preempted_age_s=fields.optional_number("preempted_age_s"),
        last_scheduled_age_s=fields.optional_number("last_scheduled_age_s"),
        num_uncached_tokens=fields.integer("num_uncached_tokens"),
        delivered_age_sum_s=fields.number("delivered_age_sum_s"),
    )


def plan_to_proto(plan: Plan) -> pb.Plan:
    return pb.Plan(
        epoch=plan.epoch,
        policy=plan.policy,
        status=_STATUSES[plan.status],
        placements=[_placement_to_proto(placement) for placement in plan.placements],
        quality=None if plan.quality is None else _quality_to_proto(plan.quality),
    )


def _placement_to_proto(placement: Placement) -> pb.Placement:
    return pb.Placement(
        request_id=placement.request_id,
        offloaded_layers=placement.offloaded_layers,
        num_prefetch_buffers=placement.num_prefetch_buffers,
        paused=placement.paused,
    )


def _quality_to_proto(quality: Quality) -> pb.Quality:
    return pb.Quality(
        latency_s=quality.latency_s,
        mean_latency_s=quality.mean_latency_s,
        first_latency_s=quality.first_latency_s,
        objective_s=quality.objective_s,
        lower_bound_s=quality.lower_bound_s,
        gap_frac=quality.gap_frac,
        window=quality.window,
        expires_after=quality.expires_after,
        num_nodes=quality.num_nodes,
        serve_all=_STATUSES[quality.serve_all],
    )
