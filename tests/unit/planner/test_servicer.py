"""The planner's gRPC contract, over a real in-process channel."""

import math
from collections.abc import AsyncIterator
from functools import cache
from itertools import count

import pytest
from google.protobuf.message import DecodeError
from grpc import StatusCode, aio
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.planner.v1 import planner_pb2 as pb
from evenflow.planner.v1 import planner_pb2_grpc as pb_grpc
from lab.planning.protos import (
    make_engine,
    make_link,
    make_plan_request,
    make_prefix,
    make_profile,
    make_request,
)
from services.kit.errors import InvalidRequestError
from services.kit.rpc import ServiceInterceptor
from services.placement.presets import ALL_RESIDENT
from services.planner.convert import plan_to_proto, snapshot_from_proto
from services.planner.decision_log import DecisionLog
from services.planner.policy.orbitflow import OrbitFlow
from services.planner.policy.policies import make_plan
from services.planner.servicer import PlannerServicer
from services.planner.solver.budget import NodeBudget
from services.planner.solver.solver import warm_solver
from services.planner.worker import Worker
from tests.fuzz import examples
from tests.policies import EVERY

pytestmark = pytest.mark.timeout(3_600)  # the first run compiles the kernels


LOOK_S = 1e-4  # between two looks at the clock: budgets are counted, not measured


@pytest.fixture
async def stub() -> AsyncIterator[pb_grpc.PlannerServiceStub]:
    looks = count()
    worker = Worker(lambda: next(looks) * LOOK_S, max_budget_s=0.05)
    server = aio.server(interceptors=[ServiceInterceptor()])
    servicer = PlannerServicer(worker, DecisionLog(None), EVERY)
    pb_grpc.add_PlannerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.PlannerServiceStub(channel)
    await server.stop(grace=None)
    worker.close()


async def test_vllm_is_answered_with_epoch_policy_and_every_request(stub) -> None:
    waiting = make_request(
        request_id="b",
        phase=pb.REQUEST_PHASE_WAITING,
        num_computed_tokens=0,
        num_host_blocks=[],
    )
    request = make_plan_request(policy="vllm", requests=[make_request(), waiting], profile=None)

    response = await stub.Plan(request, timeout=600)

    assert response.plan == pb.Plan(
        epoch=3,
        policy="vllm",
        status=pb.PLAN_STATUS_OPTIMAL,
        placements=[pb.Placement(request_id="a"), pb.Placement(request_id="b")],
    )


@pytest.mark.parametrize("policy", EVERY)
async def test_every_policy_answers_within_the_pool(stub, policy) -> None:
    # 105 tokens: 7 blocks in each of 4 layers, 28 in all. 20 blocks are free.
    response = await stub.Plan(make_plan_request(policy=policy), timeout=600)

    (placement,) = response.plan.placements
    assert (response.plan.policy, placement.paused) == (policy, False)
    resident = 4 - len(placement.offloaded_layers)
    needed = resident * 7 + 6 * placement.num_prefetch_buffers + len(placement.offloaded_layers)
    assert needed <= 20 or EVERY[policy].placing is ALL_RESIDENT
    assert response.plan.quality.expires_after >= 1
    assert response.plan.quality.first_latency_s > 0


ADAPTING = [policy for policy in EVERY if not policy.endswith(":FLEXGEN")]  # the others to a batch


@pytest.mark.parametrize("policy", ADAPTING)
async def test_every_policy_places_what_requests_share_once(stub, policy) -> None:
    # 24 own tokens each and 96 shared: 3 * 2 blocks and 6 in each of 4 layers, 48 in all; 30 free.
    own = {"num_prompt_tokens": 19, "num_computed_tokens": 24, "num_host_blocks": [1] * 4}
    requests = [make_request(request_id=name, prefix_ids=["t"], **own) for name in "abc"]
    request = make_plan_request(
        policy=policy, requests=requests, prefixes=[make_prefix()], num_free_blocks=30
    )

    plan = (await stub.Plan(request, timeout=600)).plan

    (placed,) = plan.prefixes
    assert placed.prefix_id == "t"
    assert placed.offloaded_layers or EVERY[policy].placing is ALL_RESIDENT
    assert_within_pool(request.snapshot, plan)
    assert not any(placement.paused for placement in plan.placements)


async def test_quality_says_how_good_the_plan_is(stub) -> None:
    request = make_plan_request()
    request.time_budget_s = 0.01

    quality = (await stub.Plan(request, timeout=600)).plan.quality

    assert 0 < quality.lower_bound_s <= quality.objective_s
    assert quality.gap_frac == pytest.approx(quality.objective_s / quality.lower_bound_s - 1)
    assert quality.window >= 1
    assert quality.serve_all in (pb.PLAN_STATUS_OPTIMAL, pb.PLAN_STATUS_FEASIBLE)


def with_request(**overrides) -> pb.PlanRequest:
    return make_plan_request(requests=[make_request(**overrides)])


def with_parameters(**overrides) -> pb.PlanRequest:
    return make_plan_request(parameters=pb.PolicyParameters(**overrides))


NAMED = [
    (pb.PlanRequest(), "snapshot"),
    (make_plan_request(epoch=0), "snapshot.epoch"),
    (make_plan_request(policy=""), "snapshot.policy"),
    (make_plan_request(policy="gurobi"), "snapshot.policy"),
    (make_plan_request(policy="simulator.cli:app"), "snapshot.policy"),  # nothing is imported
    (make_plan_request(engine=None), "snapshot.engine"),
    (make_plan_request(engine=make_engine(num_layers=0)), "snapshot.engine.num_layers"),
    (make_plan_request(engine=make_engine(num_layers=2**31 - 1)), "snapshot.engine.num_layers"),
    (make_plan_request(engine=make_engine(block_size=0)), "snapshot.engine.block_size"),
    (make_plan_request(engine=make_engine(num_blocks=-1)), "snapshot.engine.num_blocks"),
    (make_plan_request(engine=make_engine(layers_per_group=5)), "engine.layers_per_group"),
    (
        make_plan_request(engine=make_engine(num_layers=193), requests=[]),
        "snapshot.engine.layers_per_group",
    ),
    (make_plan_request(num_free_blocks=101), "snapshot.num_free_blocks"),
    (make_plan_request(num_free_blocks=-1), "snapshot.num_free_blocks"),
    (make_plan_request(profile=None), "snapshot.profile"),
    (make_plan_request(h2d=None), "snapshot.h2d"),
    (make_plan_request(policy="layerkv", d2h=None), "snapshot.d2h"),
    (make_plan_request(h2d=make_link(bytes_per_s=0.0)), "snapshot.h2d.bytes_per_s"),
    (make_plan_request(h2d=make_link(chunk_bytes=0)), "snapshot.h2d.chunk_bytes"),
    (make_plan_request(profile=make_profile(layer_base_s=math.nan)), "profile.layer_base_s"),
    (make_plan_request(profile=make_profile(mean_tpot_s=-1.0)), "profile.mean_tpot_s"),
    (with_parameters(min_window=0), "parameters.min_window"),
    (with_parameters(max_window=2**20), "parameters.max_window"),
    (with_parameters(min_window=9, max_window=8), "parameters.max_window"),
    (with_parameters(min_pause_s=2.0, max_pause_s=1.0), "parameters.max_pause_s"),
    (with_parameters(alpha=math.inf), "parameters.alpha"),
    (with_parameters(victim_rule=77), "parameters.victim_rule"),
    (with_request(request_id=""), "requests[0].request_id"),
    (make_plan_request(requests=[make_request()] * 2), "requests[1].request_id"),
    (with_request(phase=0), "requests[0].phase"),
    (with_request(phase=99), "requests[0].phase"),
    (with_request(num_prompt_tokens=0), "requests[0].num_prompt_tokens"),
    (with_request(num_computed_tokens=106), "requests[0].num_computed_tokens"),
    (with_request(num_deposited_tokens=6), "requests[0].num_deposited_tokens"),
    (with_request(paused_age_s=1.0), "requests[0].paused_age_s"),
    (with_request(phase=pb.REQUEST_PHASE_PAUSED), "requests[0].paused_age_s"),
    (with_request(slo_tbt_s=0.0), "requests[0].slo_tbt_s"),
    (with_request(predicted_min_output_tokens=5), "requests[0].predicted_max_output_tokens"),
    (
        with_request(predicted_min_output_tokens=5, predicted_max_output_tokens=4),
        "requests[0].predicted_max_output_tokens",
    ),
    (with_request(offloaded_layers=[-1]), "requests[0].offloaded_layers"),
    (with_request(offloaded_layers=[4]), "requests[0].offloaded_layers"),
    (with_request(offloaded_layers=[2, 1]), "requests[0].offloaded_layers"),
    (with_request(num_prefetch_buffers=1), "requests[0].num_prefetch_buffers"),
    (with_request(num_blocks=[1, 2]), "requests[0].num_blocks"),
    (with_request(num_blocks=[30] * 4), "snapshot.num_free_blocks"),
    (with_request(num_host_blocks=[7] * 4), "requests[0].num_host_blocks"),
    (make_plan_request(num_write_through_blocks=-1), "snapshot.num_write_through_blocks"),
    (with_request(prefix_ids=["t"]), "requests[0].prefix_ids"),
    (make_plan_request(prefixes=[make_prefix(prefix_id="")]), "prefixes[0].prefix_id"),
    (make_plan_request(prefixes=[make_prefix(num_tokens=0)]), "prefixes[0].num_tokens"),
    (make_plan_request(prefixes=[make_prefix(num_tokens=90)]), "prefixes[0].num_tokens"),
    (make_plan_request(prefixes=[make_prefix()] * 2), "prefixes[1].prefix_id"),
    (make_plan_request(h2d=make_link(peak_bytes_per_s=0.0)), "snapshot.h2d.peak_bytes_per_s"),
    (
        make_plan_request(engine=make_engine(max_prefill_chunk_tokens=-1)),
        "engine.max_prefill_chunk_tokens",
    ),
]


@pytest.mark.parametrize(("request_", "field"), NAMED)
async def test_a_bad_field_is_refused_by_name(stub, request_, field) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await stub.Plan(request_, timeout=600)

    assert caught.value.code() is StatusCode.INVALID_ARGUMENT
    assert f"{field}: " in caught.value.details()
    assert dict(caught.value.trailing_metadata())["error-reason"] == "INVALID_REQUEST"


@pytest.mark.parametrize("budget_s", [0.0, -1.0, math.nan, math.inf])
async def test_a_bad_budget_is_refused_by_name(stub, budget_s) -> None:
    request = make_plan_request()
    request.time_budget_s = budget_s

    with pytest.raises(aio.AioRpcError) as caught:
        await stub.Plan(request, timeout=600)

    assert caught.value.code() is StatusCode.INVALID_ARGUMENT
    assert "time_budget_s: " in caught.value.details()


# -- anything at all -----------------------------------------------------------------------------

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
SMALL = st.integers(0, 40)
EXTREME = st.sampled_from([1e-9, 1.0, 1e6, 1e15, 2.5e-310, 0.0, -1.0]) | st.floats()
MAYBE = st.none() | EXTREME
LINKS = st.none() | st.builds(
    pb.Link,
    bytes_per_s=EXTREME,
    copy_overhead_s=EXTREME,
    chunk_bytes=INT64 | st.integers(1, 9),
    num_queued_bytes=INT64,
)
PROFILES = st.none() | st.builds(
    pb.Profile,
    outside_layers_s=EXTREME,
    layer_base_s=EXTREME,
    layer_s_per_token=EXTREME,
    layer_s_per_context_token=EXTREME,
    mean_tpot_s=EXTREME,
)
PARAMETERS = st.none() | st.builds(
    pb.PolicyParameters,
    alpha=MAYBE,
    min_window=st.none() | st.integers(-1, 5),
    max_window=st.none() | st.integers(-1, 64),
    victim_rule=st.integers(-1, 6),
    even_patterns_only=st.booleans(),
)


@st.composite
def almost_sound(draw: st.DrawFn) -> pb.Snapshot:
    """Return a snapshot with one part out of hand, or none."""
    engine = make_engine(
        num_blocks=draw(st.sampled_from([1, 100, 2**40])),
        block_bytes=draw(st.sampled_from([1, 65_536, 2**40])),
        block_size=draw(st.sampled_from([1, 16, 2**31 - 1])),
        max_prefill_chunk_tokens=draw(st.sampled_from([0, 1, 2**31 - 1])),
    )
    requests = [
        pb.RequestState(
            request_id=f"r{i}",
            phase=phase,
            num_prompt_tokens=draw(st.sampled_from([1, 90, 2**31 - 1])),
            num_output_tokens=draw(SMALL),
            num_computed_tokens=draw(SMALL),
            paused_age_s=0.5 if phase == pb.REQUEST_PHASE_PAUSED else None,
            on_hold=draw(st.sampled_from([False, False, False, True])),
            slo_tbt_s=draw(st.none() | st.sampled_from([1e-9, 0.01, 1e6])),
            priority=draw(INT32),
            num_host_blocks=draw(st.sampled_from([[], [0] * 4, [2] * 4, [0, 2, 1, 0]])),
            prefix_ids=draw(st.sampled_from([[], [], ["t"], ["t", "u"], ["u"], ["v"]])),
        )
        for i, phase in enumerate(draw(st.lists(st.integers(1, 5), max_size=3)))
    ]
    num_tokens = engine.block_size * draw(st.sampled_from([1, 1, 3]))
    prefixes = [
        pb.PrefixState(
            prefix_id=name,
            num_tokens=min(2**31 - 1, num_tokens),
            num_host_blocks=draw(st.sampled_from([[], [0] * 4, [1] * 4])),
        )
        for name in "tu"
    ]
    snapshot = make_plan_request(
        engine=engine, requests=requests, prefixes=prefixes, num_free_blocks=1
    ).snapshot
    snapshot.policy = draw(st.sampled_from(sorted(EVERY)))
    snapshot.num_free_blocks = draw(st.sampled_from([0, 1, 60, 100, 2**40]))
    snapshot.num_write_through_blocks = draw(st.sampled_from([0, 1, 2**40]))
    spoilt = draw(st.sampled_from(["h2d", "d2h", "profile", "parameters", "engine", "none"]))
    value = {
        "h2d": LINKS,
        "d2h": LINKS,
        "profile": PROFILES,
        "parameters": PARAMETERS,
        "engine": st.builds(pb.EngineShape, num_layers=INT32, block_size=INT32, num_blocks=INT64),
        "none": st.none(),
    }[spoilt]
    drawn = draw(value)
    if drawn is not None:
        getattr(snapshot, spoilt).CopyFrom(drawn)
    return snapshot


@cache
def optimiser() -> OrbitFlow:
    return OrbitFlow(warm_solver)


def answer(request: pb.PlanRequest) -> pb.Plan | None:
    """Return the plan, None where the request was refused as invalid; anything else raises."""
    try:
        snapshot = snapshot_from_proto(request, EVERY)
    except InvalidRequestError as error:
        if not error.field:
            raise
        return None
    plan = make_plan(snapshot, NodeBudget(200), optimiser())
    assert_within_pool(request.snapshot, plan_to_proto(plan))
    return plan_to_proto(plan)


def assert_within_pool(snapshot: pb.Snapshot, plan: pb.Plan) -> None:
    """Count the least that the running requests need, without any extras.

    Whoever keeps all layers resident leaves it to the scheduler who runs.
    """
    size, layers = snapshot.engine.block_size, snapshot.engine.num_layers
    needed, used = 0, set[str]()
    for request, placement in zip(snapshot.requests, plan.placements, strict=True):
        holds = request.phase in (pb.REQUEST_PHASE_PREFILL, pb.REQUEST_PHASE_DECODING)
        if placement.paused or not (holds or request.phase == pb.REQUEST_PHASE_PAUSED):
            continue
        full = max(request.num_prompt_tokens, request.num_computed_tokens) // size
        resident = layers - len(placement.offloaded_layers)
        needed += full * (resident + placement.num_prefetch_buffers)
        used.update(request.prefix_ids)
    for prefix, place in zip(snapshot.prefixes, plan.prefixes, strict=True):
        if prefix.prefix_id in used:
            num_units = layers - len(place.offloaded_layers) + place.num_prefetch_buffers
            needed += prefix.num_tokens // size * num_units
    held = sum(sum(request.num_blocks) for request in snapshot.requests)
    unlimited = EVERY[snapshot.policy].placing is ALL_RESIDENT
    assert unlimited or needed <= snapshot.num_free_blocks + held


@given(snapshot=almost_sound())
@settings(max_examples=examples(100))
def test_any_snapshot_is_answered_in_full_or_refused_by_field(snapshot: pb.Snapshot) -> None:
    plan = answer(pb.PlanRequest(snapshot=snapshot))

    if plan is not None:
        assert plan.status != pb.PLAN_STATUS_UNSPECIFIED
        assert [p.request_id for p in plan.placements] == [r.request_id for r in snapshot.requests]
        assert [p.prefix_id for p in plan.prefixes] == [p.prefix_id for p in snapshot.prefixes]


@given(payload=st.binary(max_size=300))
@settings(max_examples=examples(100))
def test_any_bytes_that_parse_are_answered_or_refused_by_field(payload: bytes) -> None:
    try:
        request = pb.PlanRequest.FromString(payload)
    except DecodeError:
        return
    answer(request)
