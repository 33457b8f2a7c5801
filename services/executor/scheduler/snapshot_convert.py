"""Snapshots to protobuf and plans from it. Imports pb2, so only the planner client's thread does.

A plan that says something impossible by itself raises `GarbageError`; whether it fits the engine
is for `plan_rules`.
"""

import math

from evenflow.planner.v1 import planner_pb2 as pb
from services.placement.types import (
    BufferMode,
    EngineShape,
    Link,
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

_PHASES = {
    RequestPhase.WAITING: pb.REQUEST_PHASE_WAITING,
    RequestPhase.PREFILL: pb.REQUEST_PHASE_PREFILL,
    RequestPhase.DECODING: pb.REQUEST_PHASE_DECODING,
    RequestPhase.PAUSED: pb.REQUEST_PHASE_PAUSED,
    RequestPhase.PREEMPTED: pb.REQUEST_PHASE_PREEMPTED,
}
_STATUSES = {
    pb.PLAN_STATUS_OPTIMAL: PlanStatus.OPTIMAL,
    pb.PLAN_STATUS_FEASIBLE: PlanStatus.FEASIBLE,
    pb.PLAN_STATUS_INFEASIBLE: PlanStatus.INFEASIBLE,
    pb.PLAN_STATUS_UNDECIDED: PlanStatus.UNDECIDED,
}
_VICTIM_RULES = {
    None: pb.VICTIM_RULE_UNSPECIFIED,
    VictimRule.KV_AND_DEPOSIT: pb.VICTIM_RULE_KV_AND_DEPOSIT,
    VictimRule.LONGEST: pb.VICTIM_RULE_LONGEST,
    VictimRule.SHORTEST: pb.VICTIM_RULE_SHORTEST,
    VictimRule.RANDOM: pb.VICTIM_RULE_RANDOM,
    VictimRule.SMALLEST_SET: pb.VICTIM_RULE_SMALLEST_SET,
}
_BUFFER_MODES = {
    BufferMode.PRIVATE: pb.BUFFER_MODE_PRIVATE,
    BufferMode.EQ1: pb.BUFFER_MODE_EQ1,
}


class GarbageError(ValueError):
    """An answer that no planner in its senses gives."""


def snapshot_to_proto(snapshot: Snapshot) -> pb.Snapshot:
    return pb.Snapshot(
        epoch=snapshot.epoch,
        policy=snapshot.policy,
        seed=snapshot.seed,
        engine=_engine_to_proto(snapshot.engine),
        requests=[_request_to_proto(request) for request in snapshot.requests],
        num_free_blocks=snapshot.num_free_blocks,
        num_free_host_blocks=snapshot.num_free_host_blocks,
        num_free_staging_blocks=snapshot.num_free_staging_blocks,
        last_completion_age_s=snapshot.last_completion_age_s,
        h2d=_link_to_proto(snapshot.h2d),
        d2h=_link_to_proto(snapshot.d2h),
        profile=_profile_to_proto(snapshot.profile),
        parameters=_parameters_to_proto(snapshot.parameters),
        num_write_through_blocks=snapshot.num_write_through_blocks,
    )


def _engine_to_proto(engine: EngineShape) -> pb.EngineShape:
    model = engine.model
    return pb.EngineShape(
        num_layers=engine.num_layers,
        layers_per_group=engine.layers_per_group,
        block_size=engine.block_size,
        num_blocks=engine.num_blocks,
        block_bytes=engine.block_bytes,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        num_host_blocks=engine.num_host_blocks,
        max_model_len=engine.max_model_len,
        max_prefill_chunk_tokens=engine.max_prefill_chunk_tokens,
        model=pb.ModelShape(
            num_parameters=model.num_parameters,
            hidden_size=model.hidden_size,
            num_kv_heads=model.num_kv_heads,
            head_size=model.head_size,
            tensor_parallel_size=model.tensor_parallel_size,
            pipeline_parallel_size=model.pipeline_parallel_size,
            vocab_size=model.vocab_size,
            num_weight_bytes=model.num_weight_bytes,
        ),
    )


def _request_to_proto(request: RequestState) -> pb.RequestState:
    return pb.RequestState(
        request_id=request.request_id,
        phase=_PHASES[request.phase],
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_deposited_tokens=request.num_deposited_tokens,
        arrival_age_s=request.arrival_age_s,
        first_token_age_s=request.first_token_age_s,
        last_release_age_s=request.last_release_age_s,
        paused_age_s=request.paused_age_s,
        resumed_age_s=request.resumed_age_s,
        num_pauses=request.num_pauses,
        slo_ttft_s=request.slo_ttft_s,
        slo_tpot_s=request.slo_tpot_s,
        slo_tbt_s=request.slo_tbt_s,
        consumption_rate_tps=request.consumption_rate_tps,
        priority=request.priority,
        predicted_min_output_tokens=request.predicted_min_output_tokens,
        predicted_max_output_tokens=request.predicted_max_output_tokens,
        offloaded_layers=request.offloaded_layers,
        num_prefetch_buffers=request.num_prefetch_buffers,
        num_blocks=request.num_blocks,
        num_host_blocks=request.num_host_blocks,
        on_hold=request.on_hold,
        num_preemptions=request.num_preemptions,
        preempted_age_s=request.preempted_age_s,
        last_scheduled_age_s=request.last_scheduled_age_s,
        num_uncached_tokens=request.num_uncached_tokens,
        delivered_age_sum_s=request.delivered_age_sum_s,
    )


def _link_to_proto(link: Link | None) -> pb.Link | None:
    if link is None:
        return None
    return pb.Link(
        bytes_per_s=link.bytes_per_s,
        copy_overhead_s=link.copy_overhead_s,
        chunk_bytes=link.chunk_bytes,
        num_queued_bytes=link.num_queued_bytes,
        peak_bytes_per_s=link.peak_bytes_per_s,
    )


def _profile_to_proto(profile: Profile | None) -> pb.Profile | None:
    if profile is None:
        return None
    return pb.Profile(
        outside_layers_s=profile.outside_layers_s,
        layer_base_s=profile.layer_base_s,
        layer_s_per_token=profile.layer_s_per_token,
        layer_s_per_context_token=profile.layer_s_per_context_token,
        prefill_s_per_token=profile.prefill_s_per_token,
        mean_tpot_s=profile.mean_tpot_s,
        capacity_tps=profile.capacity_tps,
        peak_flops_per_s=profile.peak_flops_per_s,
    )


def _parameters_to_proto(parameters: PolicyParameters) -> pb.PolicyParameters:
    return pb.PolicyParameters(
        placement_policy=parameters.placement_policy,
        run_policy=parameters.run_policy,
        admission_policy=parameters.admission_policy,
        deposit=parameters.deposit,
        pause=parameters.pause,
        alpha=parameters.alpha,
        min_window=parameters.min_window,
        max_window=parameters.max_window,
        min_pause_s=parameters.min_pause_s,
        max_pause_s=parameters.max_pause_s,
        victim_rule=_VICTIM_RULES[parameters.victim_rule],
        buffer_mode=_BUFFER_MODES[parameters.buffer_mode],
        even_patterns_only=parameters.even_patterns_only,
        no_overlap=not parameters.overlap,
        no_slo_admission=not parameters.slo_aware,
    )


def plan_from_proto(message: pb.Plan) -> Plan:
    """Return a plan. Raises GarbageError."""
    status = _STATUSES.get(message.status)
    if status is None:
        raise GarbageError(f"status {message.status}")
    return Plan(
        epoch=message.epoch,
        policy=message.policy,
        status=status,
        placements=tuple(_placement_from_proto(entry) for entry in message.placements),
        quality=_quality_from_proto(message.quality) if message.HasField("quality") else None,
    )


def _placement_from_proto(message: pb.Placement) -> Placement:
    return Placement(
        request_id=RequestId(message.request_id),
        offloaded_layers=tuple(message.offloaded_layers),
        num_prefetch_buffers=message.num_prefetch_buffers,
        paused=message.paused,
    )


def _quality_from_proto(message: pb.Quality) -> Quality:
    times_s = (
        message.latency_s,
        message.mean_latency_s,
        message.first_latency_s,
        message.objective_s,
        message.lower_bound_s,
    )
    if not all(math.isfinite(time_s) and time_s >= 0.0 for time_s in times_s):
        raise GarbageError(f"latencies {times_s}")
    if message.window < 1 or message.expires_after < 0:
        raise GarbageError(f"window {message.window}, expires after {message.expires_after}")
    return Quality(
        latency_s=message.latency_s,
        mean_latency_s=message.mean_latency_s,
        first_latency_s=message.first_latency_s,
        objective_s=message.objective_s,
        lower_bound_s=message.lower_bound_s,
        window=message.window,
        expires_after=message.expires_after,
        num_nodes=message.num_nodes,
        serve_all=_STATUSES.get(message.serve_all, PlanStatus.UNDECIDED),
    )
