"""The tracker as the process that an operator runs, with a Redis that dies and comes back."""

import asyncio
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from evenflow.tracker.v1 import tracker_pb2 as pb
from evenflow.tracker.v1 import tracker_pb2_grpc as pb_grpc
from lab.stack.ports import free_port
from lab.stack.redis_server import RedisServer
from services.kit.rpc import make_channel
from services.reporting.ledger import RequestRef
from services.reporting.reporter import Sender, SenderKind, TrackerReporter

if TYPE_CHECKING:
    from evenflow.tracker.v1.tracker_pb2_grpc import TrackerServiceAsyncStub

REPO = Path(__file__).parents[2]
EPOCH = 1_800_000_000_123_456
EX = pb.SnapshotRequest(executor_id="ex0")
OFFER = pb.RegisterExecutorRequest(executor_id="ex0", epoch=EPOCH, address="h:1", model="m")
WAIT_S = 300.0

pytestmark = pytest.mark.timeout(1_200)


class TrackerProcess:
    """`python -m services.tracker` on fixed ports."""

    def __init__(self, redis_url: str) -> None:
        self.port, self.metrics_port = free_port(), free_port()
        self._environment = os.environ | {
            "PYTHONPATH": f"{REPO}:{REPO / 'protos'}",
            "EVENFLOW_TRACKER_GRPC_PORT": str(self.port),
            "EVENFLOW_TRACKER_METRICS_PORT": str(self.metrics_port),
            "EVENFLOW_TRACKER_REDIS_URL": redis_url,
            "EVENFLOW_TRACKER_REDIS_TIMEOUT_S": "20",  # the machine may be busy
            "EVENFLOW_TRACKER_LEASE_TTL_S": "600",
        }

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def channel(self) -> aio.Channel:
        """Return a channel with a connection of its own: a shared one may be the dead process's."""
        return aio.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.subprocess.Process]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.tracker", env=self._environment, cwd=REPO
        )
        try:
            await self._wait_until_serving()
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _wait_until_serving(self) -> None:
        async with self.channel() as channel:
            updates = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=WAIT_S
            )
            async for update in updates:
                if update.status == health_pb2.HealthCheckResponse.SERVING:
                    updates.cancel()
                    return


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture
def tracker(redis_server: RedisServer) -> TrackerProcess:
    return TrackerProcess(redis_server.url)


@pytest.fixture
async def stub(tracker: TrackerProcess) -> "AsyncIterator[TrackerServiceAsyncStub]":
    async with make_channel(tracker.address, default_timeout_s=WAIT_S) as channel:
        yield pb_grpc.TrackerServiceStub(channel)


async def code_of(call: Any) -> StatusCode:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def test_it_serves_without_redis_and_recovers_when_redis_comes(
    tracker: TrackerProcess, redis_server: RedisServer, stub: "TrackerServiceAsyncStub"
) -> None:
    async with tracker.running():
        assert await code_of(stub.Snapshot(EX)) is StatusCode.UNAVAILABLE
        assert await code_of(stub.RegisterExecutor(OFFER)) is StatusCode.UNAVAILABLE

        redis_server.start()
        await stub.RegisterExecutor(OFFER)
        assert (await stub.Snapshot(EX)).executor.epoch == EPOCH

        redis_server.kill()
        assert await code_of(stub.Snapshot(EX)) is StatusCode.UNAVAILABLE
        redis_server.start()
        assert not (await stub.Snapshot(EX)).HasField("executor")
        await stub.RegisterExecutor(OFFER)


async def test_a_restarted_tracker_finds_the_record_in_redis(
    tracker: TrackerProcess, redis_server: RedisServer, stub: "TrackerServiceAsyncStub"
) -> None:
    redis_server.start()
    async with tracker.running() as process:
        await stub.RegisterExecutor(OFFER)
        process.kill()

    async with tracker.running(), tracker.channel() as channel:
        answer = await pb_grpc.TrackerServiceStub(channel).Snapshot(EX, timeout=WAIT_S)

    assert answer.executor.epoch == EPOCH


async def test_it_drains_on_sigterm(tracker: TrackerProcess, redis_server: RedisServer) -> None:
    redis_server.start()
    async with tracker.running() as process:
        process.send_signal(signal.SIGTERM)

        async with asyncio.timeout(WAIT_S):
            assert await process.wait() == 0


async def test_its_metrics_show_reports_and_the_state_of_redis(
    tracker: TrackerProcess, redis_server: RedisServer, stub: "TrackerServiceAsyncStub"
) -> None:
    def metrics() -> str:
        url = f"http://127.0.0.1:{tracker.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            return str(answer.read().decode())

    redis_server.start()
    async with tracker.running():
        entry = pb.Progress(executor_id="ex0", request_id="x", generation=1)
        await stub.Report(pb.ReportRequest(gateway_id="gw0", epoch=EPOCH, progress=[entry]))
        up = await asyncio.to_thread(metrics)
        redis_server.kill()
        await code_of(stub.Snapshot(EX))
        down = await asyncio.to_thread(metrics)

    assert 'evenflow_tracker_reports_total{sender="gateway"} 1.0' in up
    assert 'evenflow_tracker_entries_total{result="unknown"} 1.0' in up
    assert "evenflow_tracker_redis_up 1.0" in up
    assert "evenflow_tracker_redis_up 0.0" in down
    assert 'evenflow_tracker_redis_errors_total{kind="ConnectionError"}' in down


async def take_lease(stub: "TrackerServiceAsyncStub") -> None:
    await stub.RegisterExecutor(OFFER)


async def stream_tokens(
    gateway: TrackerReporter, executor: TrackerReporter, num_tokens: range
) -> None:
    """Generate and deliver tokens of twenty requests, the reader two behind."""
    for count in num_tokens:
        for i in range(20):
            ref = RequestRef("ex0", f"r{i}", 1)
            executor.update(ref, num_generated=count, state=pb.REQUEST_STATE_DECODING)
            gateway.update(ref, num_delivered=max(0, count - 2))
        await asyncio.sleep(0.01)


async def until_counts(
    stub: "TrackerServiceAsyncStub", expected: dict[str, tuple[int, int, int]]
) -> None:
    """Return once (generated, delivered, deposited) of every request is as expected."""
    seen: dict[str, tuple[int, int, int]] = {}
    async with asyncio.timeout(WAIT_S):
        while seen != expected:
            await asyncio.sleep(0.05)
            snapshot = await stub.Snapshot(EX, wait_for_ready=True)
            seen = {
                r.request_id: (
                    r.num_generated_tokens,
                    r.num_delivered_tokens,
                    r.num_deposited_tokens,
                )
                for r in snapshot.requests
            }


async def test_counts_equal_the_truth_after_tracker_and_redis_were_killed_under_load(
    tracker: TrackerProcess, redis_server: RedisServer, stub: "TrackerServiceAsyncStub"
) -> None:
    gateway = TrackerReporter(stub, sender=Sender(kind=SenderKind.GATEWAY, id="gw0", epoch=EPOCH))
    executor = TrackerReporter(
        stub,
        sender=Sender(kind=SenderKind.EXECUTOR, id="ex0", epoch=EPOCH),
        on_lease_lost=lambda: take_lease(stub),
    )
    loops = [asyncio.ensure_future(reporter.run()) for reporter in (gateway, executor)]
    for i in range(20):
        gateway.register(
            pb.Registration(
                executor_id="ex0", request_id=f"r{i}", generation=1, num_prompt_tokens=4
            )
        )
    redis_server.start()
    async with tracker.running() as process:
        await stream_tokens(gateway, executor, range(1, 51))
        await until_counts(stub, {f"r{i}": (50, 48, 2) for i in range(20)})
        redis_server.kill()
        await stream_tokens(gateway, executor, range(51, 81))
        redis_server.start()
        await stream_tokens(gateway, executor, range(81, 101))
        await until_counts(stub, {f"r{i}": (100, 98, 2) for i in range(20)})
        process.kill()
        await stream_tokens(gateway, executor, range(101, 131))

    async with tracker.running(), tracker.channel() as channel:
        await stream_tokens(gateway, executor, range(131, 151))
        for i in range(20):
            ref = RequestRef("ex0", f"r{i}", 1)
            executor.update(ref, state=pb.REQUEST_STATE_FINISHED, final=True)
            gateway.update(ref, num_delivered=150, final=True)
        await until_counts(
            pb_grpc.TrackerServiceStub(channel), {f"r{i}": (150, 150, 0) for i in range(20)}
        )

    for loop in loops:
        assert not loop.done()
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
