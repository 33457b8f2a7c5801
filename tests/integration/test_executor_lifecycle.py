"""How an executor starts, drains and dies."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2

from evenflow.executor.v1 import executor_pb2 as pb
from tests.executor_client import GatewayStream
from tests.executor_process import ExecutorProcess
from tests.processes import wait_until

pytestmark = pytest.mark.timeout(400)

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LONG = {"temperature": 0, "max_tokens": 1200}


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[ExecutorProcess]:
    process = ExecutorProcess(tmp_path / "executor.log", DRAIN_TIMEOUT_S=60)
    process.start()
    try:
        yield process
    finally:
        process.stop()


async def exit_code(executor: ExecutorProcess) -> int:
    return await asyncio.to_thread(executor.process.wait, 90)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


async def test_health_answers_while_the_model_loads_and_a_dead_front_leaves_no_engine(
    executor: ExecutorProcess,
) -> None:
    wait_until(lambda: executor.health() is not None, "the gRPC server")
    assert executor.health() == NOT_SERVING
    async with GatewayStream(executor.address) as early:
        with pytest.raises(aio.AioRpcError) as caught:
            await early.reader
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(aio.AioRpcError) as caught:
            await early.stub.GetLoad(pb.GetLoadRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await asyncio.to_thread(executor.wait_serving)
    engine = executor.engine_processes()
    assert len(engine) == 2  # EngineCore and one worker

    executor.process.kill()

    assert await exit_code(executor) == -signal.SIGKILL
    await asyncio.to_thread(assert_gone, engine)


async def test_requests_fail_and_may_be_retried_when_the_engine_dies(
    executor: ExecutorProcess,
) -> None:
    await asyncio.to_thread(executor.wait_serving)
    engine = executor.engine_processes()
    async with GatewayStream(executor.address) as gateway:
        answers = [await gateway.submit(f"r{i}", text="hello", sampling=LONG) for i in range(3)]
        for answer in answers:
            await gateway.wait(answer.started)
        next(p for p in engine if "EngineCore" in " ".join(p.cmdline())).kill()
        for answer in answers:
            await gateway.wait(answer.done)
            assert answer.ending is not None
            assert answer.ending.failure.retryable
        with pytest.raises(aio.AioRpcError) as caught:
            await asyncio.wait_for(gateway.reader, timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    assert await exit_code(executor) == 70
    await asyncio.to_thread(assert_gone, engine)


async def test_sigterm_lets_live_requests_end_and_refuses_new_ones(
    executor: ExecutorProcess,
) -> None:
    await asyncio.to_thread(executor.wait_serving)
    engine = executor.engine_processes()
    async with GatewayStream(executor.address) as gateway:
        live = await gateway.submit("live", text="hello", sampling=LONG)
        await gateway.wait(live.started)
        executor.process.terminate()
        num_late = 0
        late = await gateway.ask("late0", text="hello", sampling={"max_tokens": 1})
        while late.rejected is None:  # until the signal has arrived
            num_late += 1
            late = await gateway.ask(f"late{num_late}", text="hello", sampling={"max_tokens": 1})
        assert late.reject_code == "UNAVAILABLE"
        await gateway.wait(live.done)
        assert live.finish_reason == "LENGTH"
        assert len(live.ids) == 1200

    assert await exit_code(executor) == 0
    await asyncio.to_thread(assert_gone, engine)


async def test_sigterm_while_the_model_loads_ends_at_once(executor: ExecutorProcess) -> None:
    wait_until(lambda: executor.health() is not None, "the gRPC server")
    executor.process.terminate()

    assert await exit_code(executor) == 0
