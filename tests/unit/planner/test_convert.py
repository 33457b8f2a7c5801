"""What crosses the wire arrives in the domain, field by field."""

from evenflow.planner.v1 import planner_pb2 as pb
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
from services.planner.convert import plan_to_proto, snapshot_from_proto

ENGINE = {
    "num_layers": 4,
    "layers_per_group": 2,
    "block_size": 16,
    "num_blocks": 101,
    "block_bytes": 65_536,
    "max_num_seqs": 7,
    "max_num_batched_tokens": 2_049,
    "num_host_blocks": 5_001,
    "max_model_len": 8_193,
    "max_prefill_chunk_tokens": 1_025,
}
MODEL = {
    "num_parameters": 8_030_000_000,
    "hidden_size": 4_096,
    "num_kv_heads": 8,
    "head_size": 128,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 3,
    "vocab_size": 128_256,
    "num_weight_bytes": 16_060_000_000,
}
REQUEST = {
    "request_id": "a",
    "num_prompt_tokens": 100,
    "num_output_tokens": 9,
    "num_computed_tokens": 107,
    "num_deposited_tokens": 4,
    "arrival_age_s": 12.0,
    "first_token_age_s": 11.0,
    "last_release_age_s": 0.25,
    "paused_age_s": 0.5,
    "resumed_age_s": 3.0,
    "num_pauses": 2,
    "slo_ttft_s": 1.5,
    "slo_tpot_s": 0.2,
    "slo_tbt_s": 0.3,
    "consumption_rate_tps": 8.0,
    "priority": -3,
    "predicted_min_output_tokens": 10,
    "predicted_max_output_tokens": 20,
    "offloaded_layers": (2, 3),
    "num_prefetch_buffers": 1,
    "num_blocks": (7, 8),
    "num_host_blocks": (6, 5),
    "on_hold": True,
    "num_preemptions": 3,
    "last_scheduled_age_s": 0.125,
    "num_uncached_tokens": 48,
    "delivered_age_sum_s": 40.5,
}
H2D = {
    "bytes_per_s": 12e9,
    "copy_overhead_s": 1e-5,
    "chunk_bytes": 999,
    "num_queued_bytes": 77,
    "peak_bytes_per_s": 13e9,
}
D2H = H2D | {"bytes_per_s": 11e9, "num_queued_bytes": 76}
PROFILE = {
    "outside_layers_s": 0.002,
    "layer_base_s": 0.001,
    "layer_s_per_token": 1e-6,
    "layer_s_per_context_token": 7e-9,
    "prefill_s_per_token": 2e-4,
    "mean_tpot_s": 0.03,
    "capacity_tps": 500.0,
    "peak_flops_per_s": 1e14,
}
PARAMETERS = {
    "placement_policy": "optimiser",
    "run_policy": "fcfs",
    "admission_policy": "slo-aware",
    "deposit": True,
    "pause": True,
    "alpha": 2.0,
    "min_window": 4,
    "max_window": 64,
    "min_pause_s": 0.5,
    "max_pause_s": 20.0,
    "even_patterns_only": True,
}
COUNTS = {
    "num_free_blocks": 80,
    "num_free_host_blocks": 4_000,
    "num_free_staging_blocks": 3,
    "num_write_through_blocks": 5,
}
PREEMPTED = {"request_id": "b", "num_prompt_tokens": 9, "preempted_age_s": 0.5}


def test_every_field_of_a_snapshot_arrives() -> None:
    message = pb.Snapshot(
        epoch=9,
        policy="orbitflow",
        seed=-5,
        engine=pb.EngineShape(**ENGINE, model=pb.ModelShape(**MODEL)),
        requests=[
            pb.RequestState(**REQUEST, phase=pb.REQUEST_PHASE_PAUSED),
            pb.RequestState(**PREEMPTED, phase=pb.REQUEST_PHASE_PREEMPTED),
        ],
        last_completion_age_s=0.75,
        h2d=pb.Link(**H2D),
        d2h=pb.Link(**D2H),
        profile=pb.Profile(**PROFILE),
        parameters=pb.PolicyParameters(
            **PARAMETERS,
            victim_rule=pb.VICTIM_RULE_RANDOM,
            buffer_mode=pb.BUFFER_MODE_EQ1,
            no_overlap=True,
            no_slo_admission=True,
        ),
        **COUNTS,
    )
    for part in (message, message.engine, message.requests[0], message.parameters):
        unset = {field.name for field in part.DESCRIPTOR.fields} - {
            field.name for field, _ in part.ListFields()
        }
        assert unset <= {"preempted_age_s"}, "the test leaves a field of the contract out"

    arrived = snapshot_from_proto(pb.PlanRequest(snapshot=message))

    assert arrived == Snapshot(
        epoch=9,
        policy="orbitflow",
        seed=-5,
        engine=EngineShape(**ENGINE, model=ModelShape(**MODEL)),
        requests=(
            RequestState(**(REQUEST | {"request_id": RequestId("a")}), phase=RequestPhase.PAUSED),
            RequestState(
                request_id=RequestId("b"),
                phase=RequestPhase.PREEMPTED,
                num_prompt_tokens=9,
                num_output_tokens=0,
                num_computed_tokens=0,
                num_deposited_tokens=0,
                arrival_age_s=0.0,
                preempted_age_s=0.5,
            ),
        ),
        last_completion_age_s=0.75,
        h2d=Link(**H2D),
        d2h=Link(**D2H),
        profile=Profile(**PROFILE),
        parameters=PolicyParameters(
            **PARAMETERS,
            victim_rule=VictimRule.RANDOM,
            buffer_mode=BufferMode.EQ1,
            overlap=False,
            slo_aware=False,
        ),
        **COUNTS,
    )


def test_unset_parameters_are_the_documented_defaults() -> None:
    message = pb.Snapshot(
        epoch=1, policy="vllm", engine=pb.EngineShape(**ENGINE), num_free_blocks=1
    )

    arrived = snapshot_from_proto(pb.PlanRequest(snapshot=message))

    assert arrived.parameters == PolicyParameters()
    assert (arrived.h2d, arrived.profile, arrived.last_completion_age_s) == (None, None, None)
    assert arrived.engine.model == ModelShape()


def test_every_field_of_a_plan_leaves() -> None:
    plan = Plan(
        epoch=9,
        policy="orbitflow",
        status=PlanStatus.FEASIBLE,
        placements=(
            Placement(request_id=RequestId("a"), offloaded_layers=(2, 3), num_prefetch_buffers=1),
            Placement(request_id=RequestId("b"), paused=True),
        ),
        quality=Quality(
            latency_s=0.05,
            mean_latency_s=0.04,
            first_latency_s=0.03,
            objective_s=0.055,
            lower_bound_s=0.05,
            window=32,
            expires_after=40,
            num_nodes=1_234,
            serve_all=PlanStatus.INFEASIBLE,
        ),
    )

    message = plan_to_proto(plan)

    assert message.quality.gap_frac == 0.055 / 0.05 - 1.0
    message.quality.ClearField("gap_frac")
    assert message == pb.Plan(
        epoch=9,
        policy="orbitflow",
        status=pb.PLAN_STATUS_FEASIBLE,
        placements=[
            pb.Placement(request_id="a", offloaded_layers=[2, 3], num_prefetch_buffers=1),
            pb.Placement(request_id="b", paused=True),
        ],
        quality=pb.Quality(
            latency_s=0.05,
            mean_latency_s=0.04,
            first_latency_s=0.03,
            objective_s=0.055,
            lower_bound_s=0.05,
            window=32,
            expires_after=40,
            num_nodes=1_234,
            serve_all=pb.PLAN_STATUS_INFEASIBLE,
        ),
    )
