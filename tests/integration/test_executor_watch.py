"""Watching a real engine whose pool does not hold its requests, on an emulated device."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from evenflow.executor.v1 import executor_pb2 as pb
from tests.executor_client import ANSWER_TIMEOUT_S, Answer, GatewayStream
from tests.executor_process import ExecutorProcess
from tests.models import NUM_LAYERS

pytestmark = pytest.mark.timeout(400)

LAYER_S = 0.004
PROMPT = "The import statement finds a module, loads it, and binds its name. " * 24
# float32, block 32: a block of one layer is 2 x 32 tokens x 2 heads x 32 x 4 bytes = 32 KiB at
# most, so that the pool holds one of the two prompts and not both.
POOL_BYTES = 6 << 20


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExecutorProcess]:
    process = ExecutorProcess(
        tmp_path_factory.mktemp("executor") / "executor.log",
        LAYERWISE_KV="true",
        BLOCK_SIZE=32,
        KV_CACHE_MEMORY_BYTES=POOL_BYTES,
        KV_HOST_MEMORY_BYTES=64 << 20,
        KV_EMULATED_LAYER_S=LAYER_S,
        KV_EMULATED_TOKEN_S=1e-6,
    )
    with process.serving():
        yield process


@pytest.fixture
async def gateway(executor: ExecutorProcess) -> AsyncIterator[GatewayStream]:
    async with GatewayStream(executor.address) as stream:
        yield stream


async def updates(gateway: GatewayStream) -> AsyncIterator[pb.WatchRequestsResponse]:
    watch = gateway.stub.WatchRequests(pb.WatchRequestsRequest(max_updates_per_s=20))
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        async for update in watch:
            yield update


async def until_done(
    gateway: GatewayStream, answer: Answer
) -> AsyncIterator[pb.WatchRequestsResponse]:
    async for update in updates(gateway):
        if answer.done.is_set():
            return
        yield update


async def test_a_watcher_sees_where_the_kv_of_each_layer_is(gateway: GatewayStream) -> None:
    sampling = {"temperature": 0, "max_tokens": 200}
    answers = [await gateway.submit(name, text=PROMPT, sampling=sampling) for name in "ab"]
    seen: set[int] = set()
    async for update in updates(gateway):
        for request in update.requests:
            assert len(request.residency) in (0, NUM_LAYERS)
            seen.update(request.residency)
        assert 0 <= update.num_free_pool_blocks <= update.num_pool_blocks
        if {pb.RESIDENCY_RESIDENT, pb.RESIDENCY_OFFLOADED} <= seen:
            break
    for answer in answers:
        await gateway.wait(answer.done)
        assert len(answer.tokens) == 200


async def test_no_step_is_shorter_than_the_layers_of_the_emulated_device(
    gateway: GatewayStream,
) -> None:
    answer = await gateway.submit("a", text="hi", sampling={"max_tokens": 60})
    await gateway.wait(answer.started)
    steps_s = [
        update.observed_step_s
        async for update in until_done(gateway, answer)
        if update.requests and update.requests[0].state == pb.REQUEST_STATE_DECODING
    ]

    assert steps_s
    # Sleeps are never too short, but for the little that is left to the next layer.
    assert min(steps_s) > 0.98 * NUM_LAYERS * LAYER_S
