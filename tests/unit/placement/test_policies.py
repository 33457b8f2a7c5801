"""What each policy decides."""

from services.placement.policies import all_resident
from services.placement.types import (
    EngineShape,
    Placement,
    PlanStatus,
    RequestId,
    RequestPhase,
    RequestState,
    Snapshot,
)

ENGINE = EngineShape(
    num_layers=4,
    layers_per_group=1,
    block_size=16,
    num_blocks=10,
    block_bytes=4_096,
    max_num_seqs=8,
    max_num_batched_tokens=2_048,
)


def make_request(request_id: str, phase: RequestPhase) -> RequestState:
    return RequestState(
        request_id=RequestId(request_id),
        phase=phase,
        num_prompt_tokens=1_000,
        num_output_tokens=0,
        num_computed_tokens=0,
        num_deposited_tokens=0,
        arrival_age_s=0.0,
        offloaded_layers=(1, 3),
    )


def test_vllm_keeps_everything_resident_and_pauses_nobody_even_beyond_the_pool() -> None:
    requests = (
        make_request("long", RequestPhase.DECODING),
        make_request("held", RequestPhase.PAUSED),
    )
    snapshot = Snapshot(
        epoch=7, policy="vllm", seed=0, engine=ENGINE, requests=requests, num_free_blocks=0
    )

    plan = all_resident(snapshot)

    assert (plan.epoch, plan.policy, plan.status) == (7, "vllm", PlanStatus.OPTIMAL)
    assert plan.placements == (
        Placement(request_id=RequestId("long"), offloaded_layers=(), paused=False),
        Placement(request_id=RequestId("held"), offloaded_layers=(), paused=False),
    )
