"""The tracker's gRPC contract, over a real in-process channel, on the in-memory store."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc import StatusCode, aio

from evenflow.executor.v1.executor_pb2 import Load
from evenflow.gateway.v1 import generation_pb2
from evenflow.tracker.v1 import tracker_pb2 as pb
from evenflow.tracker.v1 import tracker_pb2_grpc as pb_grpc
from lab.memory_tracker_store import MemoryTrackerStore
from services.kit.server import ServiceServer
from services.tracker.servicer import TrackerServicer
from services.tracker.types import Lifetimes

if TYPE_CHECKING:
    from evenflow.tracker.v1.tracker_pb2_grpc import TrackerServiceAsyncStub

EPOCH = 1_800_000_000_123_456
LEVEL = generation_pb2.ServiceLevel(slo_tbt_s=0.125, consumption_rate_tps=10.0, pace_tail=True)


class FakeClock:
    now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


class World:
    """A served tracker, with its clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        store = MemoryTrackerStore(Lifetimes(lease_ttl_s=2.5), clock=self.clock)
        servicer = TrackerServicer(store, lease_ttl_s=2.5, clock=self.clock)
        self.server = ServiceServer("127.0.0.1:0", [])
        pb_grpc.add_TrackerServiceServicer_to_server(servicer, self.server.grpc)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.server.start()
    yield world
    await world.server.grpc.stop(grace=None)


@pytest.fixture
async def stub(world: World) -> "AsyncIterator[TrackerServiceAsyncStub]":
    async with aio.insecure_channel(f"127.0.0.1:{world.server.port}") as channel:
        yield pb_grpc.TrackerServiceStub(channel)


def offer(**overrides: Any) -> pb.RegisterExecutorRequest:
    fields = {"executor_id": "ex0", "epoch": EPOCH, "address": "h:1", "model": "m"} | overrides
    return pb.RegisterExecutorRequest(**fields)


def registration(**overrides: Any) -> pb.Registration:
    fields = {"executor_id": "ex0", "request_id": "r", "generation": 1, "num_prompt_tokens": 4}
    return pb.Registration(**fields | overrides)


def registering(*entries: pb.Registration, **overrides: Any) -> pb.RegisterRequest:
    fields: dict[str, Any] = {"gateway_id": "gw0", "gateway_epoch": EPOCH, "registrations": entries}
    return pb.RegisterRequest(**fields | overrides)


def progress(**overrides: Any) -> pb.Progress:
    return pb.Progress(**{"executor_id": "ex0", "request_id": "r", "generation": 1} | overrides)


def by_executor(*entries: pb.Progress, **overrides: Any) -> pb.ReportRequest:
    fields: dict[str, Any] = {"executor_id": "ex0", "epoch": EPOCH, "progress": entries}
    return pb.ReportRequest(**fields | overrides)


def by_gateway(*entries: pb.Progress, **overrides: Any) -> pb.ReportRequest:
    fields: dict[str, Any] = {"gateway_id": "gw0", "epoch": EPOCH, "progress": entries}
    return pb.ReportRequest(**fields | overrides)


async def prepare(stub: "TrackerServiceAsyncStub") -> None:
    await stub.RegisterExecutor(offer())
    await stub.Register(registering(registration(service_level=LEVEL)))


async def refusal(call: Any) -> tuple[grpc.StatusCode, str, str]:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    error = caught.value
    reason = dict(error.trailing_metadata() or ())["error-reason"]
    return error.code(), str(reason), error.details() or ""


async def test_a_lease_and_its_life_come_back_as_they_were_given(
    world: World, stub: "TrackerServiceAsyncStub"
) -> None:
    load = Load(num_running_reqs=1, num_newcomers=2, kv_unavailable_frac=0.5)

    answer = await stub.RegisterExecutor(offer(load=load))
    assert answer.lease_ttl.ToTimedelta().total_seconds() == 2.5

    world.clock.now_s += 1.0
    [executor] = (await stub.ListExecutors(pb.ListExecutorsRequest())).executors
    assert (executor.executor_id, executor.epoch) == ("ex0", EPOCH)
    assert (executor.address, executor.model, executor.load) == ("h:1", "m", load)
    assert executor.lease_ttl.ToTimedelta().total_seconds() == 1.5
    renewal = pb.RenewLeaseRequest(executor_id="ex0", epoch=EPOCH, load=load)
    assert (await stub.RenewLease(renewal)).lease_ttl.ToTimedelta().total_seconds() == 2.5
    await stub.ReleaseLease(pb.ReleaseLeaseRequest(executor_id="ex0", epoch=EPOCH))
    assert not (await stub.ListExecutors(pb.ListExecutorsRequest())).executors
    assert not (await stub.Snapshot(pb.SnapshotRequest(executor_id="ex0"))).HasField("executor")


async def test_a_snapshot_shows_counts_deposit_and_ages(
    world: World, stub: "TrackerServiceAsyncStub"
) -> None:
    await prepare(stub)
    world.clock.now_s += 1.0
    await stub.Report(
        by_executor(progress(num_generated_tokens=7, state=pb.REQUEST_STATE_DECODING))
    )
    world.clock.now_s += 0.5
    await stub.Report(by_gateway(progress(num_delivered_tokens=5)))
    world.clock.now_s += 0.25

    snapshot = await stub.Snapshot(pb.SnapshotRequest(executor_id="ex0"))

    assert list(snapshot.requests) == [
        pb.RequestRecord(
            executor_id="ex0",
            request_id="r",
            generation=1,
            gateway_id="gw0",
            state=pb.REQUEST_STATE_DECODING,
            num_prompt_tokens=4,
            num_generated_tokens=7,
            num_delivered_tokens=5,
            num_deposited_tokens=2,
            generated_age_s=0.75,
            delivered_age_s=0.25,
            registered_age_s=1.75,
            service_level=LEVEL,
        )
    ]
    assert snapshot.executor.executor_id == "ex0"


async def test_what_was_never_reported_has_no_age(stub: "TrackerServiceAsyncStub") -> None:
    await prepare(stub)

    [record] = (await stub.Snapshot(pb.SnapshotRequest(executor_id="ex0"))).requests

    assert not record.HasField("generated_age_s")
    assert not record.HasField("delivered_age_s")


async def test_entries_that_were_not_applied_are_named_by_kind(
    stub: "TrackerServiceAsyncStub",
) -> None:
    await stub.RegisterExecutor(offer())
    await stub.Register(
        registering(registration(request_id="end"), registration(request_id="new", generation=2))
    )
    await stub.Report(by_executor(progress(request_id="end", state=pb.REQUEST_STATE_FAILED)))

    answer = await stub.Report(
        by_executor(
            progress(request_id="none"),
            progress(request_id="new"),
            progress(request_id="end", state=pb.REQUEST_STATE_DECODING),
        )
    )

    def key(name: str) -> pb.RequestKey:
        return pb.RequestKey(executor_id="ex0", request_id=name)

    assert answer == pb.ReportResponse(
        unknown=[key("none")], stale=[key("new")], illegal=[key("end")]
    )
    again = await stub.Register(registering(registration(request_id="new")))
    assert list(again.stale) == [key("new")]


async def test_refusals_carry_status_and_reason(stub: "TrackerServiceAsyncStub") -> None:
    renewal = pb.RenewLeaseRequest(executor_id="ex0", epoch=EPOCH, load=Load())
    code, reason, _ = await refusal(stub.RenewLease(renewal))
    assert (code, reason) == (StatusCode.NOT_FOUND, "LEASE_EXPIRED")
    await prepare(stub)
    code, reason, _ = await refusal(stub.RegisterExecutor(offer(epoch=EPOCH - 1)))
    assert (code, reason) == (StatusCode.ABORTED, "STALE_EPOCH")


@pytest.mark.parametrize(
    ("method", "request_message", "field"),
    [
        ("RegisterExecutor", offer(executor_id=""), "executor_id"),
        ("RegisterExecutor", offer(executor_id="a{b}"), "executor_id"),
        ("RegisterExecutor", offer(epoch=0), "epoch"),
        ("RegisterExecutor", offer(epoch=2**53), "epoch"),
        ("RegisterExecutor", offer(address=""), "address"),
        ("RegisterExecutor", offer(model=""), "model"),
        (
            "RegisterExecutor",
            offer(load=Load(num_running_reqs=-1)),
            "load.num_running_reqs",
        ),
        (
            "RegisterExecutor",
            offer(load=Load(kv_unavailable_frac=1.01)),
            "load.kv_unavailable_frac",
        ),
        ("RenewLease", pb.RenewLeaseRequest(executor_id="ex0", epoch=1), "load"),
        ("ReleaseLease", pb.ReleaseLeaseRequest(executor_id="ex0", epoch=-1), "epoch"),
        ("Register", registering(registration(), gateway_id=""), "gateway_id"),
        ("Register", registering(registration(), gateway_epoch=0), "gateway_epoch"),
        ("Register", registering(), "registrations"),
        (
            "Register",
            registering(registration(), registration(request_id="")),
            "registrations[1].request_id",
        ),
        (
            "Register",
            registering(registration(request_id="x" * 129)),
            "registrations[0].request_id",
        ),
        ("Register", registering(registration(generation=0)), "registrations[0].generation"),
        (
            "Register",
            registering(registration(num_prompt_tokens=0)),
            "registrations[0].num_prompt_tokens",
        ),
        (
            "Register",
            registering(registration(service_level=generation_pb2.ServiceLevel(slo_tbt_s=0.0))),
            "registrations[0].service_level.slo_tbt_s",
        ),
        ("Report", pb.ReportRequest(epoch=1), "sender"),
        ("Report", by_executor(epoch=0), "epoch"),
        ("Report", by_executor(progress(executor_id="ex1")), "progress[0].executor_id"),
        ("Report", by_executor(progress(generation=0)), "progress[0].generation"),
        (
            "Report",
            by_executor(progress(num_generated_tokens=-1)),
            "progress[0].num_generated_tokens",
        ),
        (
            "Report",
            by_executor(progress(num_delivered_tokens=1)),
            "progress[0].num_delivered_tokens",
        ),
        ("Report", by_executor(progress(state=99)), "progress[0].state"),
        ("Report", by_gateway(progress(executor_id="")), "progress[0].executor_id"),
        (
            "Report",
            by_gateway(progress(num_delivered_tokens=-1)),
            "progress[0].num_delivered_tokens",
        ),
        (
            "Report",
            by_gateway(progress(num_generated_tokens=1)),
            "progress[0].num_generated_tokens",
        ),
        ("Report", by_gateway(progress(state=pb.REQUEST_STATE_FAILED)), "progress[0].state"),
        ("Report", by_gateway(*[progress()] * 10_001), "progress"),
        ("Snapshot", pb.SnapshotRequest(), "executor_id"),
    ],
)
async def test_a_bad_field_is_refused_by_name(
    stub: "TrackerServiceAsyncStub", method: str, request_message: Message, field: str
) -> None:
    code, _, details = await refusal(getattr(stub, method)(request_message))

    assert (code, details.split(": ")[0]) == (StatusCode.INVALID_ARGUMENT, field)


@pytest.mark.parametrize(
    ("method", "request_message"),
    [
        ("RegisterExecutor", offer(epoch=1, executor_id="x" * 128)),
        ("RegisterExecutor", offer(epoch=2**53 - 1)),
        ("RegisterExecutor", offer(load=Load(kv_unavailable_frac=1.0))),
        ("Register", registering(registration(request_id="x" * 128, num_prompt_tokens=1))),
        ("Report", by_gateway(progress(num_delivered_tokens=0))),
        ("Report", by_gateway(*[progress()] * 10_000)),
    ],
)
async def test_values_at_their_limits_are_accepted(
    stub: "TrackerServiceAsyncStub", method: str, request_message: Message
) -> None:
    await getattr(stub, method)(request_message)
