"""The planner's gRPC contract, over a real in-process channel."""

import math
from collections.abc import AsyncIterator

import pytest
from google.protobuf.message import DecodeError
from grpc import StatusCode, aio
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.planner.v1 import planner_pb2 as pb
from evenflow.planner.v1 import planner_pb2_grpc as pb_grpc
from services.kit.errors import InvalidRequestError
from services.kit.rpc import ServiceInterceptor
from services.placement.policies import POLICIES
from services.planner.convert import plan_to_proto, snapshot_from_proto
from services.planner.servicer import PlannerServicer


def make_request(**overrides) -> pb.RequestState:
    values = {
        "request_id": "a",
        "phase": pb.REQUEST_PHASE_DECODING,
        "num_prompt_tokens": 10,
        "num_output_tokens": 5,
        "num_computed_tokens": 15,
        "arrival_age_s": 2.0,
        "offloaded_layers": [0, 3],
    }
    return pb.RequestState(**(values | overrides))


def make_engine(**overrides) -> pb.EngineShape:
    values = {
        "num_layers": 4,
        "layers_per_group": 1,
        "block_size": 16,
        "num_blocks": 100,
        "block_bytes": 4_096,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2_048,
    }
    return pb.EngineShape(**(values | overrides))


def make_plan_request(**overrides) -> pb.PlanRequest:
    values = {
        "epoch": 3,
        "policy": "vllm",
        "engine": make_engine(),
        "requests": [make_request()],
        "num_free_blocks": 4,
    }
    return pb.PlanRequest(snapshot=pb.Snapshot(**(values | overrides)))


@pytest.fixture
async def stub() -> AsyncIterator[pb_grpc.PlannerServiceStub]:
    server = aio.server(interceptors=[ServiceInterceptor()])
    pb_grpc.add_PlannerServiceServicer_to_server(PlannerServicer(POLICIES), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.PlannerServiceStub(channel)
    await server.stop(grace=None)


async def test_a_sound_snapshot_is_answered_with_its_epoch_policy_and_every_request(stub) -> None:
    waiting = make_request(request_id="b", phase=pb.REQUEST_PHASE_WAITING, offloaded_layers=[])
    request = make_plan_request(requests=[make_request(), waiting])

    response = await stub.Plan(request, timeout=30)

    assert response.plan == pb.Plan(
        epoch=3,
        policy="vllm",
        status=pb.PLAN_STATUS_OPTIMAL,
        placements=[pb.Placement(request_id="a"), pb.Placement(request_id="b")],
    )


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.PlanRequest(), "snapshot"),
        (make_plan_request(epoch=0), "snapshot.epoch"),
        (make_plan_request(policy=""), "snapshot.policy"),
        (make_plan_request(policy="gurobi"), "snapshot.policy"),
        (make_plan_request(engine=None), "snapshot.engine"),
        (make_plan_request(engine=make_engine(num_layers=0)), "snapshot.engine.num_layers"),
        (make_plan_request(engine=make_engine(num_layers=2**31 - 1)), "snapshot.engine.num_layers"),
        (make_plan_request(engine=make_engine(block_size=0)), "snapshot.engine.block_size"),
        (make_plan_request(engine=make_engine(num_blocks=-1)), "snapshot.engine.num_blocks"),
        (
            make_plan_request(engine=make_engine(layers_per_group=5)),
            "snapshot.engine.layers_per_group",
        ),
        (make_plan_request(num_free_blocks=101), "snapshot.num_free_blocks"),
        (make_plan_request(num_free_blocks=-1), "snapshot.num_free_blocks"),
        (make_plan_request(requests=[make_request(request_id="")]), "requests[0].request_id"),
        (make_plan_request(requests=[make_request()] * 2), "requests[1].request_id"),
        (make_plan_request(requests=[make_request(phase=0)]), "requests[0].phase"),
        (make_plan_request(requests=[make_request(phase=99)]), "requests[0].phase"),
        (
            make_plan_request(requests=[make_request(num_prompt_tokens=0)]),
            "requests[0].num_prompt_tokens",
        ),
        (
            make_plan_request(requests=[make_request(num_computed_tokens=16)]),
            "requests[0].num_computed_tokens",
        ),
        (
            make_plan_request(requests=[make_request(arrival_age_s=math.nan)]),
            "requests[0].arrival_age_s",
        ),
        (
            make_plan_request(requests=[make_request(arrival_age_s=-0.1)]),
            "requests[0].arrival_age_s",
        ),
        (make_plan_request(requests=[make_request(slo_tbt_s=0.0)]), "requests[0].slo_tbt_s"),
        (
            make_plan_request(requests=[make_request(consumption_rate_tps=math.inf)]),
            "requests[0].consumption_rate_tps",
        ),
        (
            make_plan_request(requests=[make_request(offloaded_layers=[-1])]),
            "requests[0].offloaded_layers",
        ),
        (
            make_plan_request(requests=[make_request(offloaded_layers=[4])]),
            "requests[0].offloaded_layers",
        ),
    ],
)
async def test_a_bad_field_is_refused_by_name(stub, request_, field) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await stub.Plan(request_, timeout=30)

    assert caught.value.code() is StatusCode.INVALID_ARGUMENT
    assert f"{field}: " in caught.value.details()
    assert dict(caught.value.trailing_metadata())["error-reason"] == "INVALID_REQUEST"


INT32 = st.integers(-(2**31), 2**31 - 1) | st.integers(-1, 20)
INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 200)
MAYBE = st.none() | st.floats(allow_nan=True, allow_infinity=True)
ENGINES = st.builds(
    pb.EngineShape,
    num_layers=INT32,
    layers_per_group=INT32,
    block_size=INT32,
    num_blocks=INT64,
    block_bytes=INT64,
    max_num_seqs=INT32,
    max_num_batched_tokens=INT32,
)
REQUESTS = st.builds(
    pb.RequestState,
    request_id=st.text(max_size=4),
    phase=st.integers(-3, 9),
    num_prompt_tokens=INT32,
    num_output_tokens=INT32,
    num_computed_tokens=INT32,
    num_deposited_tokens=INT32,
    arrival_age_s=st.floats(),
    first_token_age_s=MAYBE,
    slo_tbt_s=MAYBE,
    consumption_rate_tps=MAYBE,
    offloaded_layers=st.lists(INT32, max_size=5),
)
SNAPSHOTS = st.builds(
    pb.Snapshot,
    epoch=INT64,
    policy=st.sampled_from(["vllm", "", "x"]),
    seed=INT64,
    engine=st.none() | ENGINES | st.just(make_engine()),
    requests=st.lists(REQUESTS | st.just(make_request()), max_size=3),
    num_free_blocks=INT64,
)


def answer(request: pb.PlanRequest) -> pb.Plan | None:
    """Return the plan, None where the request was refused as invalid; anything else raises."""
    try:
        snapshot = snapshot_from_proto(request, known_policies=POLICIES.keys())
    except InvalidRequestError as error:
        if not error.field:
            raise
        return None
    return plan_to_proto(POLICIES[snapshot.policy](snapshot))


@given(snapshot=SNAPSHOTS)
@settings(max_examples=300, deadline=None)
def test_any_snapshot_is_answered_in_full_or_refused_by_field(snapshot: pb.Snapshot) -> None:
    plan = answer(pb.PlanRequest(snapshot=snapshot))

    if plan is not None:
        assert [p.request_id for p in plan.placements] == [r.request_id for r in snapshot.requests]


@given(payload=st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_bytes_that_parse_are_answered_or_refused_by_field(payload: bytes) -> None:
    try:
        request = pb.PlanRequest.FromString(payload)
    except DecodeError:
        return
    answer(request)
