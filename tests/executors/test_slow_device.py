"""A slow device: what a client leaves behind there, and how long its steps take."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from grpc import aio

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.executor.v1 import executor_pb2_grpc as pb_grpc
from lab.executor_client import MODEL, GatewayStream
from lab.models import NUM_LAYERS
from lab.slow_device.emulated_device import LayerTime
from lab.stack.executor_process import ExecutorProcess
from tests.gateways import gateway_for, until

pytestmark = pytest.mark.timeout(3_600)

LAYER_S = 0.04  # eight layers: a step takes a third of a second, however busy the machine is
MAX_STEPS = 3  # the one that runs when the client goes, and two more
NUM_TOKENS = 4_000  # twenty minutes

both_ways = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExecutorProcess]:
    process = ExecutorProcess(
        tmp_path_factory.mktemp("executor") / "executor.log",
        LAYERWISE_KV="true",
        KV_HOST_MEMORY_BYTES=64 << 20,
        layer_time=LayerTime(base_s=LAYER_S),
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


async def num_steps_after_leaving(executor: ExecutorProcess, *, stream: bool) -> int:
    """Return in how many steps the engine is rid of a request whose client has gone away."""
    body = {"model": MODEL, "prompt": "Go on.", "max_tokens": NUM_TOKENS, "temperature": 0}
    async with gateway_for(executor) as client, watching(executor.address) as engine:
        await client.wait_ready()
        asking = asyncio.create_task(
            client.http.post("/v1/completions", json=body | {"stream": stream}, timeout=None)
        )
        await until(lambda: engine.num_generated > 2)
        num_before = engine.now.num_steps
        asking.cancel()
        await until(lambda: not engine.now.requests)
        return engine.now.num_steps - num_before


@both_ways
async def test_its_request_leaves_the_engine_long_before_its_end(
    executor: ExecutorProcess, stream: bool
) -> None:
    assert await num_steps_after_leaving(executor, stream=stream) < NUM_TOKENS / 2


@pytest.mark.nightly
@both_ways
async def test_its_request_leaves_the_engine_within_three_steps(
    executor: ExecutorProcess, stream: bool
) -> None:
    assert await num_steps_after_leaving(executor, stream=stream) <= MAX_STEPS


async def test_no_step_is_shorter_than_the_layers_of_the_emulated_device(
    executor: ExecutorProcess,
) -> None:
    async with GatewayStream(executor.address) as gateway:
        answer = await gateway.submit("a", text="hi", sampling={"max_tokens": NUM_TOKENS})
        steps_s: list[float] = []
        async for update in gateway.updates():
            if update.requests and update.requests[0].state == pb.REQUEST_STATE_DECODING:
                steps_s.append(update.observed_step_s)
            if len(steps_s) == 10:
                break
        await gateway.abort(answer, "a")

    # Sleeps are never too short, but for the little that is left to the next layer.
    assert min(steps_s) > 0.98 * NUM_LAYERS * LAYER_S
