"""A client that goes away: the engine is rid of its request within three steps."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from grpc import aio

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.executor.v1 import executor_pb2_grpc as pb_grpc
from tests.executor_process import ExecutorProcess
from tests.gateways import gateway_for, until

pytestmark = pytest.mark.timeout(400)

LAYER_S = 0.04  # eight layers: a step takes a third of a second, however busy the machine is
MAX_STEPS = 3  # the one that runs when the client goes, and two more


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExecutorProcess]:
    process = ExecutorProcess(
        tmp_path_factory.mktemp("executor") / "executor.log",
        LAYERWISE_KV="true",
        KV_HOST_MEMORY_BYTES=64 << 20,
        KV_EMULATED_LAYER_S=LAYER_S,
    )
    with process.serving():
        yield process


class Watched:
    """The newest state of an engine."""

    def __init__(self) -> None:
        self.now = pb.WatchRequestsResponse()

    @property
    def num_generated(self) -> int:
        return sum(request.num_generated_tokens for request in self.now.requests)


@asynccontextmanager
async def watching(address: str) -> AsyncIterator[Watched]:
    """Keep the state of the engine at `address` up to date while the block runs."""
    watched = Watched()

    async def follow() -> None:
        request = pb.WatchRequestsRequest(max_updates_per_s=20)
        async for update in pb_grpc.ExecutorServiceStub(channel).WatchRequests(request):
            watched.now = update

    async with aio.insecure_channel(address) as channel:
        following = asyncio.create_task(follow())
        try:
            yield watched
        finally:
            following.cancel()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_its_request_leaves_the_engine_within_three_steps(
    executor: ExecutorProcess, stream: bool
) -> None:
    body = {"model": "exactness", "prompt": "Go on.", "max_tokens": 1000, "temperature": 0}
    async with gateway_for(executor) as client, watching(executor.address) as engine:
        await client.wait_ready()
        asking = asyncio.create_task(
            client.http.post("/v1/completions", json=body | {"stream": stream})
        )
        await until(lambda: engine.num_generated > 2)
        num_before = engine.now.num_steps
        asking.cancel()
        await until(lambda: not engine.now.requests)

        assert engine.now.num_steps - num_before <= MAX_STEPS
