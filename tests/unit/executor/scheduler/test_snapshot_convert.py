"""Snapshots and plans on the wire, read by the planner's own converters."""

import dataclasses

from evenflow.planner.v1 import planner_pb2 as pb
from services.executor.scheduler.snapshot_convert import plan_from_proto, snapshot_to_proto
from services.placement.types import (
    BufferMode,
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
    Snapshot,
    VictimRule,
)
from services.planner.convert import plan_to_proto, snapshot_from_proto
from tests.snapshots import make_engine, make_request, make_snapshot

LINK = Link(
    bytes_per_s=2e9,
    copy_overhead_s=1e-5,
    chunk_bytes=1 << 20,
    num_queued_bytes=77,
    peak_bytes_per_s=3e9,
)
FULL = dataclasses.replace(
    make_snapshot(
        make_request(
            "a",
            phase=RequestPhase.PAUSED,
            num_deposited_tokens=3,
            last_release_age_s=0.5,
            paused_age_s=0.25,
            resumed_age_s=9.0,
            num_pauses=2,
            slo_ttft_s=1.0,
            slo_tpot_s=0.2,
            slo_tbt_s=0.3,
            consumption_rate_tps=4.0,
            priority=-5,
            predicted_min_output_tokens=70,
            predicted_max_output_tokens=90,
            offloaded_layers=(1, 3),
            num_prefetch_buffers=2,
            num_blocks=(9,) * 8,
            on_hold=True,
            num_preemptions=1,
            last_scheduled_age_s=0.01,
            num_uncached_tokens=2,
            delivered_age_sum_s=12.5,
        ),
        make_request("b", phase=RequestPhase.PREEMPTED, preempted_age_s=2.0),
        num_free_blocks=1_234,
    ),
    epoch=9,
    seed=11,
    engine=make_engine(
        max_prefill_chunk_tokens=512,
        model=ModelShape(
            num_parameters=8,
            hidden_size=7,
            num_kv_heads=6,
            head_size=5,
            tensor_parallel_size=4,
            pipeline_parallel_size=3,
            vocab_size=2,
            num_weight_bytes=16,
        ),
    ),
    num_free_host_blocks=55,
    num_free_staging_blocks=6,
    last_completion_age_s=3.0,
    h2d=LINK,
    d2h=dataclasses.replace(LINK, bytes_per_s=1e9),
    profile=Profile(
        outside_layers_s=1e-3,
        layer_base_s=2e-3,
        layer_s_per_token=3e-5,
        layer_s_per_context_token=4e-8,
        prefill_s_per_token=5e-4,
        mean_tpot_s=6e-2,
        capacity_tps=70.0,
        peak_flops_per_s=8e12,
    ),
    parameters=PolicyParameters(
        placement_policy="optimiser",
        run_policy="fcfs",
        admission_policy="slo-aware",
        deposit=False,
        pause=True,
        alpha=2.0,
        min_window=3,
        max_window=40,
        min_pause_s=0.5,
        max_pause_s=6.0,
        victim_rule=VictimRule.RANDOM,
        buffer_mode=BufferMode.EQ1,
        even_patterns_only=True,
        overlap=False,
        slo_aware=False,
    ),
    num_write_through_blocks=99,
)


def sent(snapshot: Snapshot) -> Snapshot:
    wire = pb.PlanRequest(snapshot=snapshot_to_proto(snapshot)).SerializeToString()
    return snapshot_from_proto(pb.PlanRequest.FromString(wire))


def test_the_planner_reads_what_the_engine_wrote() -> None:
    assert sent(FULL) == FULL


def test_what_is_not_known_stays_unknown() -> None:
    bare = make_snapshot(make_request("a", first_token_age_s=None), h2d=None, profile=None)
    bare = dataclasses.replace(bare, d2h=None, policy="vllm")

    assert sent(bare) == bare


def test_the_engine_reads_what_the_planner_wrote() -> None:
    plan = Plan(
        epoch=4,
        policy="orbitflow",
        status=PlanStatus.UNDECIDED,
        placements=(
            Placement(request_id=RequestId("a"), offloaded_layers=(0, 2), num_prefetch_buffers=1),
            Placement(request_id=RequestId("b"), paused=True),
        ),
        quality=Quality(
            latency_s=0.04,
            mean_latency_s=0.03,
            first_latency_s=0.02,
            objective_s=0.05,
            lower_bound_s=0.01,
            window=8,
            expires_after=20,
            num_nodes=300,
            serve_all=PlanStatus.INFEASIBLE,
        ),
    )

    assert plan_from_proto(plan_to_proto(plan)) == plan
    assert plan_from_proto(plan_to_proto(dataclasses.replace(plan, quality=None))).quality is None
