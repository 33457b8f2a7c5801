"""The executor of several modules, and a gateway's stream to the one of a module."""

from collections.abc import AsyncIterator, Iterator

import pytest

from lab.executor_client import GatewayStream
from lab.stack.executor_process import ExecutorProcess
from lab.stack.ports import free_port
from tests.otlp_receiver import OtlpReceiver, otlp_receiver


@pytest.fixture(scope="session")
def collector() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def plain_executor(
    tmp_path_factory: pytest.TempPathFactory, collector: OtlpReceiver
) -> Iterator[ExecutorProcess]:
    """An executor without layer-wise KV, whose spans the collector takes."""
    process = ExecutorProcess(
        tmp_path_factory.mktemp("executor") / "executor.log",
        KV_MAX_PAUSE_S=3_600,
        OTLP_TRACES_ENDPOINT=collector.endpoint,
        KV_EVENTS_ENDPOINT=f"tcp://*:{free_port()}",
        KV_EVENTS_TOPIC="kv@127.0.0.1@exactness",
    )
    with process.serving():
        yield process


@pytest.fixture
async def gateway(executor: ExecutorProcess) -> AsyncIterator[GatewayStream]:
    async with GatewayStream(executor.address) as stream:
        yield stream
