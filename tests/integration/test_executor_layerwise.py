"""A real executor with layer-wise KV behind a real channel: a prompt larger than its pool."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from evenflow.executor.v1 import executor_pb2 as pb
from tests.executor_client import GatewayStream, check_hold
from tests.executor_process import ExecutorProcess
from tests.executor_stock import answers_of_stock_vllm

pytestmark = pytest.mark.timeout(400)

BLOCK_SIZE = 32
LAYERS_PER_GROUP = 2  # of 8
NUM_BLOCKS = 81  # one is vLLM's own; the others hold 80 / 4 * 32 = 640 tokens of all layers
PROMPT = "The import statement finds a module, loads it, and binds its name."
REQUESTS: dict[str, dict[str, Any]] = {
    "long": {"prompt": PROMPT * 70, "sampling": {"temperature": 0, "max_tokens": 96}},
    "short": {"prompt": PROMPT, "sampling": {"temperature": 0, "max_tokens": 160}},
    "other": {"prompt": PROMPT[4:] * 9, "sampling": {"temperature": 0, "max_tokens": 96}},
}


@pytest.fixture(scope="module")
def roomy() -> dict[str, dict[str, Any]]:
    """The answers of stock vLLM with a pool that holds everything; before our engine starts."""
    return dict(zip(REQUESTS, answers_of_stock_vllm(list(REQUESTS.values())), strict=True))


@pytest.fixture(scope="module")
def executor(
    tmp_path_factory: pytest.TempPathFactory, roomy: dict[str, dict[str, Any]]
) -> Iterator[ExecutorProcess]:
    process = ExecutorProcess(
        tmp_path_factory.mktemp("executor") / "executor.log",
        LAYERWISE_KV=True,
        KV_LAYERS_PER_GROUP=LAYERS_PER_GROUP,
        KV_LINK_BYTES_PER_S=1e9,
        BLOCK_SIZE=BLOCK_SIZE,
        NUM_GPU_BLOCKS_OVERRIDE=NUM_BLOCKS,
    )
    process.start()
    try:
        process.wait_serving()
        yield process
    finally:
        process.stop()


@pytest.fixture
async def gateway(executor: ExecutorProcess) -> AsyncIterator[GatewayStream]:
    async with GatewayStream(executor.address) as stream:
        yield stream


def read_metrics(executor: ExecutorProcess) -> dict[str, float]:
    url = f"http://127.0.0.1:{executor.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=30) as response:
        text = response.read().decode()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_the_pool_is_described_in_blocks_of_a_layer_group(gateway: GatewayStream) -> None:
    info = await gateway.stub.GetModelInfo(pb.GetModelInfoRequest())

    assert (info.num_gpu_blocks, info.block_size) == (NUM_BLOCKS, BLOCK_SIZE)
    assert info.layers_per_group == LAYERS_PER_GROUP


async def test_a_prompt_larger_than_the_pool_gets_the_tokens_of_a_roomy_engine(
    roomy: dict[str, dict[str, Any]], executor: ExecutorProcess, gateway: GatewayStream
) -> None:
    info = await gateway.stub.GetModelInfo(pb.GetModelInfoRequest())
    num_resident_tokens = (
        info.num_gpu_blocks * info.block_size * info.layers_per_group // info.num_layers
    )
    assert roomy["long"]["num_prompt_tokens"] > num_resident_tokens

    answers = await asyncio.gather(
        *(
            gateway.ask(name, text=request["prompt"], sampling=request["sampling"])
            for name, request in REQUESTS.items()
        )
    )

    for name, answer in zip(REQUESTS, answers, strict=True):
        assert answer.ids == roomy[name]["ids"]
        assert answer.text == roomy[name]["text"]
    metrics = await asyncio.to_thread(read_metrics, executor)
    assert metrics["vllm:evenflow_kv_num_loads_total"] > 0
    assert metrics["vllm:evenflow_kv_h2d_bytes_total"] > 0
    assert metrics["vllm:evenflow_kv_d2h_bytes_total"] > 0
    assert metrics["vllm:evenflow_kv_step_stall_s_count"] > 0


async def test_a_held_request_waits_with_its_deposit_and_goes_on_where_it_was(
    gateway: GatewayStream,
) -> None:
    await check_hold(gateway, prompt=PROMPT * 20)
