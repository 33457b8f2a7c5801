"""How an executor starts. How it drains is in tests/e2e, how it dies in test_executor_reasoning."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2

from evenflow.executor.v1 import executor_pb2 as pb
from lab.executor_client import GatewayStream
from lab.kind_models import kind_model
from lab.stack.executor_process import ExecutorProcess
from lab.stack.processes import EXIT_TIMEOUT_S, wait_until
from services.kit.settings import BAD_SETTINGS_EXIT_CODE

pytestmark = pytest.mark.timeout(3_600)


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[ExecutorProcess]:
    """An executor whose model goes on loading: nobody writes what it reads."""
    model = tmp_path / "endless"
    model.mkdir()
    os.mkfifo(model / "config.json")
    process = ExecutorProcess(tmp_path / "executor.log", module="services.executor", MODEL=model)
    process.start()
    try:
        yield process
    finally:
        process.stop()


async def test_while_the_model_loads_health_answers_and_sigterm_ends_it_at_once(
    executor: ExecutorProcess,
) -> None:
    await asyncio.to_thread(wait_until, lambda: executor.health() is not None, "the gRPC server")
    assert executor.health() == health_pb2.HealthCheckResponse.NOT_SERVING
    async with GatewayStream(executor.address) as early:
        with pytest.raises(aio.AioRpcError) as caught:
            await early.reader
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(aio.AioRpcError) as caught:
            await early.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    executor.process.terminate()

    assert await asyncio.to_thread(executor.process.wait, EXIT_TIMEOUT_S) == 0


def test_what_does_not_work_together_is_said_in_a_sentence(tmp_path: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    executor = ExecutorProcess(
        tmp_path / "executor.log",
        module="services.executor",
        MODEL=kind_model("granite4"),
        ENGINE_ARGS=json.dumps(["--speculative-config", json.dumps(drafts)]),
    )
    executor.start()

    assert executor.process.wait(EXIT_TIMEOUT_S) == BAD_SETTINGS_EXIT_CODE
    said = executor.log_tail()
    assert "speculative decoding does not work with a model with states on a CPU" in said
    assert "Traceback" not in said
