"""The reporter against the real tracker edge, over a real channel, on the in-memory store."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from grpc import aio

from evenflow.tracker.v1 import tracker_pb2 as pb
from evenflow.tracker.v1 import tracker_pb2_grpc as pb_grpc
from lab.memory_tracker_store import MemoryTrackerStore
from lab.stack.ports import free_port
from services.kit.rpc import make_channel
from services.kit.server import ServiceServer
from services.reporting.ledger import LedgerLimits, RequestRef
from services.reporting.reporter import ReporterOptions, Sender, SenderKind, TrackerReporter
from services.tracker.servicer import TrackerServicer
from services.tracker.types import ExecutorId, Lifetimes, TrackedRequest

if TYPE_CHECKING:
    from evenflow.tracker.v1.tracker_pb2_grpc import TrackerServiceAsyncStub

EX = "ex0"
EPOCH = 1_800_000_000_123_456
EXECUTOR = Sender(kind=SenderKind.EXECUTOR, id=EX, epoch=EPOCH)
GATEWAY = Sender(kind=SenderKind.GATEWAY, id="gw0", epoch=EPOCH)
WAIT_S = 60.0
PATIENT = ReporterOptions(rpc_timeout_s=WAIT_S)


class FakeClock:
    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class TellingServicer(TrackerServicer):
    """Says when something may have changed."""

    changed: asyncio.Event

    async def Register(self, request: Any, context: Any) -> pb.RegisterResponse:  # noqa: N802
        answer = await super().Register(request, context)
        self.changed.set()
        return answer

    async def Report(self, request: Any, context: Any) -> pb.ReportResponse:  # noqa: N802
        answer = await super().Report(request, context)
        self.changed.set()
        return answer


class Tracker:
    """A tracker that can die and come back empty, on one address."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.clock = FakeClock(1_800_000_000.0)
        self.changed = asyncio.Event()
        self._server: ServiceServer | None = None

    async def start(self) -> None:
        self.store = MemoryTrackerStore(Lifetimes(lease_ttl_s=1e6), clock=self.clock)
        servicer = TellingServicer(self.store, lease_ttl_s=5.0, clock=self.clock)
        servicer.changed = self.changed
        self._server = ServiceServer(self.address, [])
        pb_grpc.add_TrackerServiceServicer_to_server(servicer, self._server.grpc)
        await self._server.start()

    async def kill(self) -> None:
        if self._server is not None:
            await self._server.grpc.stop(grace=None)
            self._server = None

    async def records(self) -> dict[str, TrackedRequest]:
        snapshot = await self.store.snapshot(ExecutorId(EX))
        return {record.key.request_id: record for record in snapshot.requests}

    async def until_counts(self, expected: dict[str, tuple[int, int]]) -> None:
        """Return once (generated, delivered) of every request is as expected."""
        async with asyncio.timeout(WAIT_S):
            while await self.counts() != expected:
                await self.changed.wait()
                self.changed.clear()

    async def counts(self) -> dict[str, tuple[int, int]]:
        records = await self.records()
        return {name: (r.num_generated, r.num_delivered) for name, r in records.items()}


@pytest.fixture
async def tracker() -> AsyncIterator[Tracker]:
    tracker = Tracker()
    await tracker.start()
    yield tracker
    await tracker.kill()


@pytest.fixture
async def stub(tracker: Tracker) -> "AsyncIterator[TrackerServiceAsyncStub]":
    async with make_channel(tracker.address) as channel:
        yield pb_grpc.TrackerServiceStub(channel)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1_000.0)


@pytest.fixture
def gateway(stub: "TrackerServiceAsyncStub", clock: FakeClock) -> TrackerReporter:
    return TrackerReporter(stub, sender=GATEWAY, clock=clock, options=PATIENT)


@pytest.fixture
async def executor(stub: "TrackerServiceAsyncStub", clock: FakeClock) -> TrackerReporter:
    await take_lease(stub)
    return TrackerReporter(stub, sender=EXECUTOR, clock=clock, options=PATIENT)


async def take_lease(stub: "TrackerServiceAsyncStub") -> None:
    await stub.RegisterExecutor(
        pb.RegisterExecutorRequest(executor_id=EX, epoch=EPOCH, address="host:1", model="m")
    )


def ref(request_id: str = "r", generation: int = 1) -> RequestRef:
    return RequestRef(EX, request_id, generation)


def registration(request_id: str = "r", generation: int = 1) -> pb.Registration:
    return pb.Registration(
        executor_id=EX, request_id=request_id, generation=generation, num_prompt_tokens=4
    )


@asynccontextmanager
async def running(*reporters: TrackerReporter) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(reporter.run()) for reporter in reporters]
    try:
        yield
    finally:
        for task in tasks:
            assert not task.done(), "run() must not end by itself"
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_counts_of_both_senders_meet_in_one_record(
    tracker: Tracker, gateway: TrackerReporter, executor: TrackerReporter
) -> None:
    gateway.register(registration())
    gateway.update(ref(), num_delivered=2)
    for count in (1, 5, 3):
        executor.update(ref(), num_generated=count, state=pb.REQUEST_STATE_DECODING)

    await gateway.send_due()
    await executor.send_due()

    record = (await tracker.records())["r"]
    assert (record.num_generated, record.num_delivered, record.state.value) == (5, 2, "decoding")
    assert record.num_prompt_tokens == 4
    assert gateway.num_pending == executor.num_pending == 0


async def test_an_executor_repeats_until_the_gateway_has_registered(
    tracker: Tracker, gateway: TrackerReporter, executor: TrackerReporter, clock: FakeClock
) -> None:
    executor.update(ref(), num_generated=3, final=True, state=pb.REQUEST_STATE_FINISHED)
    await executor.send_due()
    assert executor.num_pending == 1

    gateway.register(registration())
    await gateway.send_due()
    clock.now_s += 1.0
    await executor.send_due()

    record = (await tracker.records())["r"]
    assert (record.num_generated, record.state.value) == (3, "finished")
    assert executor.num_pending == 0


async def test_an_ended_request_is_forgotten_once_acknowledged_and_no_longer_needed(
    gateway: TrackerReporter, clock: FakeClock
) -> None:
    gateway.register(registration())
    gateway.update(ref(), num_delivered=2, final=True)
    await gateway.send_due()
    assert gateway.num_tracked == 1  # in case the store is lost soon

    clock.now_s += 61.0
    await gateway.send_due()

    assert gateway.num_tracked == 0


async def test_an_ended_request_that_nobody_registers_is_given_up(
    executor: TrackerReporter, clock: FakeClock
) -> None:
    executor.update(ref(), num_generated=3, final=True)
    await executor.send_due()
    clock.now_s += 59.0
    await executor.send_due()
    assert executor.num_tracked == 1

    clock.now_s += 1.0
    await executor.send_due()

    assert executor.num_tracked == 0


async def test_counts_that_come_after_the_end_are_still_sent(
    tracker: Tracker, gateway: TrackerReporter
) -> None:
    gateway.register(registration())
    gateway.update(ref(), num_delivered=2, final=True)
    await gateway.send_due()

    gateway.update(ref(), num_delivered=7)
    await gateway.send_due()

    assert await tracker.counts() == {"r": (0, 7)}


async def test_a_final_state_is_not_overwritten_by_a_late_update(
    tracker: Tracker, gateway: TrackerReporter, executor: TrackerReporter
) -> None:
    gateway.register(registration())
    await gateway.send_due()
    executor.update(ref(), state=pb.REQUEST_STATE_CANCELLED, final=True)
    executor.update(ref(), state=pb.REQUEST_STATE_DECODING, num_generated=2)

    await executor.send_due()

    assert (await tracker.records())["r"].state.value == "cancelled"


async def test_what_a_newer_generation_owns_is_forgotten(
    stub: "TrackerServiceAsyncStub", gateway: TrackerReporter, executor: TrackerReporter
) -> None:
    await stub.Register(
        pb.RegisterRequest(
            gateway_id="gw1",
            gateway_epoch=EPOCH,
            registrations=[registration("a", 2), registration("b", 2)],
        )
    )
    gateway.register(registration("a", 1))
    gateway.update(ref("b", 1), num_delivered=1)
    executor.update(ref("a", 1), num_generated=1)

    await gateway.send_due()
    await executor.send_due()

    assert (gateway.num_tracked, executor.num_tracked) == (0, 0)


async def test_requests_without_news_are_kept_alive_by_heartbeats_only(
    tracker: Tracker, gateway: TrackerReporter, clock: FakeClock
) -> None:
    async def expiry_s() -> float:
        return (await tracker.records())["r"].expires_at_s

    gateway.register(registration())
    await gateway.send_due()
    first_s = await expiry_s()
    tracker.clock.now_s += 9.0
    clock.now_s += 9.0
    await gateway.send_due()
    assert await expiry_s() == first_s  # nothing was sent

    tracker.clock.now_s += 1.0
    clock.now_s += 1.0
    await gateway.send_due()

    assert await expiry_s() == first_s + 10.0


@pytest.mark.logs("tracker_entry_refused")
async def test_an_entry_that_the_tracker_refuses_holds_up_no_other(
    tracker: Tracker, gateway: TrackerReporter
) -> None:
    names = [f"r{i}" for i in range(7)]
    for name in (*names[:3], "x" * 129, *names[3:]):
        gateway.register(registration(name))

    await gateway.send_due()

    assert sorted(await tracker.records()) == names
    assert gateway.num_tracked == len(names)


async def test_more_entries_than_fit_in_a_message_go_with_the_next(
    tracker: Tracker, stub: "TrackerServiceAsyncStub", clock: FakeClock
) -> None:
    reporter = TrackerReporter(
        stub, sender=GATEWAY, clock=clock, options=replace(PATIENT, max_entries=4)
    )
    for i in range(10):
        reporter.register(registration(f"r{i}"))

    sizes = []
    for _ in range(3):
        await reporter.send_due()
        sizes.append(len(await tracker.records()))

    assert sizes == [4, 8, 10]


async def test_a_lost_lease_is_taken_again_and_the_report_repeated(
    tracker: Tracker,
    stub: "TrackerServiceAsyncStub",
    gateway: TrackerReporter,
    clock: FakeClock,
) -> None:
    gateway.register(registration())
    await gateway.send_due()
    executor = TrackerReporter(
        stub,
        sender=EXECUTOR,
        clock=clock,
        options=PATIENT,
        on_lease_lost=lambda: take_lease(stub),
    )
    executor.update(ref(), num_generated=3)

    await executor.send_due()
    await executor.send_due()

    assert await tracker.counts() == {"r": (3, 0)}


@pytest.mark.logs("tracker_report_failed")
async def test_a_dead_tracker_disturbs_nobody_and_loses_nothing(
    tracker: Tracker, gateway: TrackerReporter
) -> None:
    await tracker.kill()
    gateway.register(registration())
    gateway.update(ref(), num_delivered=2)
    await gateway.send_due()
    assert gateway.num_pending == 1

    await tracker.start()
    async with running(gateway):
        await tracker.until_counts({"r": (0, 2)})


async def test_flush_sends_what_is_pending(tracker: Tracker, gateway: TrackerReporter) -> None:
    gateway.register(registration())
    gateway.update(ref(), num_delivered=2, final=True)

    await gateway.flush(WAIT_S)

    assert await tracker.counts() == {"r": (0, 2)}


@pytest.mark.logs("tracker_flush_timed_out")
async def test_flush_gives_up_on_a_dead_tracker(tracker: Tracker, gateway: TrackerReporter) -> None:
    await tracker.kill()
    gateway.register(registration())

    async with asyncio.timeout(WAIT_S):
        await gateway.flush(0.2)

    assert gateway.num_pending == 1


async def test_the_loop_sends_each_change_by_itself(
    tracker: Tracker, stub: "TrackerServiceAsyncStub"
) -> None:
    reporter = TrackerReporter(stub, sender=GATEWAY, options=PATIENT)
    async with running(reporter):
        reporter.register(registration())
        await tracker.until_counts({"r": (0, 0)})
        for count in range(1, 6):
            reporter.update(ref(), num_delivered=count)
            await tracker.until_counts({"r": (0, count)})


async def drive(
    gateway: TrackerReporter, executor: TrackerReporter, names: Iterable[str], num_tokens: range
) -> None:
    """Generate and deliver tokens of every request, one per step."""
    for count in num_tokens:
        for name in names:
            executor.update(ref(name), num_generated=count + 2, state=pb.REQUEST_STATE_DECODING)
            gateway.update(ref(name), num_delivered=count)
        await asyncio.sleep(0.005)


async def test_counts_converge_to_the_truth_after_the_tracker_lost_everything(
    tracker: Tracker, stub: "TrackerServiceAsyncStub"
) -> None:
    options = replace(PATIENT, interval_s=0.01, limits=LedgerLimits(heartbeat_s=0.5))
    gateway = TrackerReporter(stub, sender=GATEWAY, options=options)
    executor = TrackerReporter(
        stub, sender=EXECUTOR, options=options, on_lease_lost=lambda: take_lease(stub)
    )
    live, paused = [f"live{i}" for i in range(5)], ["paused0", "paused1"]
    async with running(gateway, executor):
        for name in ("done", *paused):
            gateway.register(registration(name))
        await drive(gateway, executor, ["done", *paused], range(1, 5))
        executor.update(ref("done"), state=pb.REQUEST_STATE_FINISHED, final=True)
        gateway.update(ref("done"), num_delivered=6, final=True)
        truth = dict.fromkeys(paused, (6, 4)) | {"done": (6, 6)}
        await tracker.until_counts(truth)
        for name in live:
            gateway.register(registration(name))
        await drive(gateway, executor, live, range(1, 20))

        await tracker.kill()
        await drive(gateway, executor, live, range(20, 40))
        await tracker.start()
        await drive(gateway, executor, live, range(40, 60))
        for name in live:
            executor.update(ref(name), state=pb.REQUEST_STATE_FINISHED, final=True)
            gateway.update(ref(name), num_delivered=61, final=True)

        await tracker.until_counts(truth | dict.fromkeys(live, (61, 61)))
        await gateway.flush(WAIT_S)
        await executor.flush(WAIT_S)
        states = {name: record.state.value for name, record in (await tracker.records()).items()}
        assert states == dict.fromkeys(("done", *live), "finished") | dict.fromkeys(
            paused, "decoding"
        )


async def test_a_closed_channel_does_not_end_the_loop(tracker: Tracker) -> None:
    channel = aio.insecure_channel(tracker.address)
    reporter = TrackerReporter(pb_grpc.TrackerServiceStub(channel), sender=GATEWAY)
    await channel.close()
    reporter.register(registration())

    await reporter.send_due()

    assert reporter.num_pending == 1
