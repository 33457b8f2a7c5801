"""The executor's lease and reports, against a served tracker that comes and goes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import pytest
from grpc import aio

from evenflow.tracker.v1 import tracker_pb2 as pb
from evenflow.tracker.v1 import tracker_pb2_grpc as pb_grpc
from lab.memory_tracker_store import MemoryTrackerStore
from lab.stack.ports import free_port
from services.executor.serving import tracker_client
from services.executor.serving.tracker_client import TrackerClient
from services.generation.lifecycle import RequestStatus
from services.kit.errors import ConflictError
from services.kit.rpc import Context, make_channel
from services.kit.server import ServiceServer
from services.reporting.load import ExecutorLoad
from services.tracker.servicer import TrackerServicer
from services.tracker.types import Lifetimes

if TYPE_CHECKING:
    from evenflow.tracker.v1.tracker_pb2_grpc import TrackerServiceAsyncStub

EPOCH = 1_800_000_000_000_000
LEASE_TTL_S = 0.6  # a third of it lies between two renewals
WAIT_S = 120.0


class CountingServicer(TrackerServicer):
    """Counts what executors that want a lease are told."""

    num_renewals = 0
    num_refusals = 0  # for a newer process has it

    async def RegisterExecutor(  # noqa: N802
        self, request: pb.RegisterExecutorRequest, context: Context
    ) -> pb.RegisterExecutorResponse:
        try:
            return await super().RegisterExecutor(request, context)
        except ConflictError:
            self.num_refusals += 1
            raise

    async def RenewLease(  # noqa: N802
        self, request: pb.RenewLeaseRequest, context: Context
    ) -> pb.RenewLeaseResponse:
        response = await super().RenewLease(request, context)
        self.num_renewals += 1
        return response


class ServedTracker:
    """A tracker with an empty store on a fixed port, started and stopped at will.

    Its clock stands still unless the test moves it.
    """

    servicer: CountingServicer

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.now_s = 1_800_000_000.0
        self._server: ServiceServer | None = None

    async def start(self) -> None:
        store = MemoryTrackerStore(Lifetimes(lease_ttl_s=LEASE_TTL_S), clock=self._clock)
        self.servicer = CountingServicer(store, lease_ttl_s=LEASE_TTL_S, clock=self._clock)
        self._server = ServiceServer(self.address, [])
        pb_grpc.add_TrackerServiceServicer_to_server(self.servicer, self._server.grpc)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.grpc.stop(grace=None)
            self._server = None

    def _clock(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long for an answer, and not for the next try."""
    monkeypatch.setattr(tracker_client, "RPC_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(tracker_client, "RETRY_S", 0.05)


@pytest.fixture
async def tracker() -> AsyncIterator[ServedTracker]:
    served = ServedTracker()
    yield served
    await served.stop()


@pytest.fixture
async def stub(tracker: ServedTracker) -> "AsyncIterator[TrackerServiceAsyncStub]":
    async with make_channel(tracker.address, default_timeout_s=WAIT_S) as channel:
        yield pb_grpc.TrackerServiceStub(channel)


@pytest.fixture
async def client(tracker: ServedTracker) -> AsyncIterator[TrackerClient]:
    async with make_channel(tracker.address) as channel:
        client = TrackerClient(channel, executor_id="ex0", epoch=EPOCH)
        running = asyncio.create_task(
            client.run(
                address="host:50051",
                model="m",
                get_load=lambda: ExecutorLoad(num_running_reqs=3, deposit_s=0.5),
            )
        )
        yield client
        running.cancel()
        await asyncio.wait([running])


async def snapshot_when(
    stub: "TrackerServiceAsyncStub", condition: Callable[[pb.SnapshotResponse], bool]
) -> pb.SnapshotResponse:
    """Poll the tracker until `condition` holds."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                seen = await stub.Snapshot(pb.SnapshotRequest(executor_id="ex0"))
                if condition(seen):
                    return seen
            except aio.AioRpcError:
                pass  # the tracker is away
            await asyncio.sleep(0.02)


async def until(condition: Callable[[], bool]) -> None:
    """Poll what nothing announces until it holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def has_lease(snapshot: pb.SnapshotResponse) -> bool:
    return snapshot.HasField("executor")


async def register(stub: "TrackerServiceAsyncStub", request_id: str) -> None:
    """Do what a gateway does when it routes a request."""
    entry = pb.Registration(
        executor_id="ex0", request_id=request_id, generation=1, num_prompt_tokens=4
    )
    await stub.Register(
        pb.RegisterRequest(gateway_id="g", gateway_epoch=EPOCH, registrations=[entry])
    )


@pytest.mark.logs("executor_registered", "lease_held")
async def test_the_lease_says_who_serves_what_under_which_load(
    tracker: ServedTracker, stub: "TrackerServiceAsyncStub", client: TrackerClient
) -> None:
    await tracker.start()
    executor = (await snapshot_when(stub, has_lease)).executor

    assert (executor.executor_id, executor.epoch) == ("ex0", EPOCH)
    assert (executor.address, executor.model) == ("host:50051", "m")
    assert executor.load.num_running_reqs == 3
    assert executor.load.deposit_s == 0.5


async def test_the_lease_outlives_its_ttl_while_the_executor_runs(
    tracker: ServedTracker, stub: "TrackerServiceAsyncStub", client: TrackerClient
) -> None:
    await tracker.start()
    await snapshot_when(stub, has_lease)
    for _ in range(5):
        seen = tracker.servicer.num_renewals
        await until(lambda seen=seen: tracker.servicer.num_renewals > seen)
        tracker.now_s += 0.8 * LEASE_TTL_S

        assert has_lease(await stub.Snapshot(pb.SnapshotRequest(executor_id="ex0")))


async def test_progress_reaches_the_tracker(
    tracker: ServedTracker, stub: "TrackerServiceAsyncStub", client: TrackerClient
) -> None:
    await tracker.start()
    await snapshot_when(stub, has_lease)
    await register(stub, "r")
    client.note("r", generation=1, num_generated=0, status=RequestStatus.QUEUED)
    client.note("r", generation=1, num_generated=5, status=RequestStatus.DECODING)
    await snapshot_when(stub, lambda s: s.requests[0].state == pb.REQUEST_STATE_DECODING)
    client.note("r", generation=1, num_generated=9, status=RequestStatus.FINISHED)

    seen = await snapshot_when(stub, lambda s: s.requests[0].state == pb.REQUEST_STATE_FINISHED)
    assert seen.requests[0].num_generated_tokens == 9


async def test_a_tracker_that_comes_back_empty_is_told_everything_again(
    tracker: ServedTracker, stub: "TrackerServiceAsyncStub", client: TrackerClient
) -> None:
    client.note(
        "r", generation=1, num_generated=5, status=RequestStatus.DECODING
    )  # nobody is there yet
    await tracker.start()
    await snapshot_when(stub, has_lease)
    await tracker.stop()
    await tracker.start()
    await snapshot_when(stub, has_lease)
    await register(stub, "r")

    seen = await snapshot_when(stub, lambda s: s.requests[0].num_generated_tokens == 5)
    assert seen.requests[0].state == pb.REQUEST_STATE_DECODING


@pytest.mark.logs("lease_not_held")
async def test_a_newer_process_keeps_the_lease_that_it_took_over(
    tracker: ServedTracker, stub: "TrackerServiceAsyncStub", client: TrackerClient
) -> None:
    await tracker.start()
    await snapshot_when(stub, has_lease)
    await stub.RegisterExecutor(
        pb.RegisterExecutorRequest(executor_id="ex0", epoch=EPOCH + 1, address="other:1", model="m")
    )
    for num_refusals in range(1, 4):  # the older one wants it back
        client.note("r", generation=1, num_generated=5, status=RequestStatus.DECODING)
        await until(lambda least=num_refusals: tracker.servicer.num_refusals >= least)
        seen = await stub.Snapshot(pb.SnapshotRequest(executor_id="ex0"))
        assert (seen.executor.epoch, seen.executor.address) == (EPOCH + 1, "other:1")


@pytest.mark.logs("lease_released")
async def test_a_released_lease_is_gone_at_once(
    tracker: ServedTracker, stub: "TrackerServiceAsyncStub"
) -> None:
    await tracker.start()
    async with make_channel(tracker.address) as channel:
        client = TrackerClient(channel, executor_id="ex0", epoch=EPOCH)
        running = asyncio.create_task(client.run(address="h:1", model="m", get_load=ExecutorLoad))
        await snapshot_when(stub, has_lease)
        running.cancel()
        await asyncio.wait([running])
        await client.release()

    assert not has_lease(await stub.Snapshot(pb.SnapshotRequest(executor_id="ex0")))


@pytest.mark.logs("lease_not_released")
async def test_releasing_to_nobody_is_no_error(tracker: ServedTracker) -> None:
    async with make_channel(tracker.address) as channel:
        await TrackerClient(channel, executor_id="ex0", epoch=EPOCH).release()
