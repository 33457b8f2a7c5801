"""What a gateway tells of a real engine whose readers take turns, beside what vLLM tells of it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lab.executor_client import ANSWER_TIMEOUT_S, MODEL
from lab.stack.executor_process import ExecutorProcess
from tests.endpoint_picker import RUNNING, WAITING, read_pod
from tests.gateways import Client, chat_body, gateway_for, until

pytestmark = pytest.mark.timeout(3_600)

NUM_READERS, NUM_SEATS = 8, 4
NUM_LOOKS = 20  # at least, with readers parked


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[ExecutorProcess]:
    process = ExecutorProcess(
        tmp_path / "executor.log", LAYERWISE_KV=True, MAX_NUM_SEQS=NUM_SEATS, MAX_MODEL_LEN=4096
    )
    with process.serving():
        yield process


async def vllm_gauge(executor: ExecutorProcess, name: str) -> float:
    """Return what vLLM itself says."""
    async with httpx.AsyncClient(timeout=ANSWER_TIMEOUT_S) as http:
        text = (await http.get(f"http://127.0.0.1:{executor.metrics_port}/metrics")).text
    families = text_string_to_metric_families(text)
    return sum(sample.value for one in families if one.name == name for sample in one.samples)


def read_slowly(client: Client, number: int) -> "asyncio.Task[object]":
    body = chat_body(
        model=MODEL,
        messages=[{"role": "user", "content": f"Reader {number}."}],
        max_tokens=3_000,
        ignore_eos=True,
        stream=True,
        evenflow={"consumption_rate_tps": 2, "pace_tail": True},
    )
    return asyncio.create_task(client.http.post("/v1/chat/completions", json=body))


async def test_parked_readers_with_tokens_in_hand_are_no_queue(executor: ExecutorProcess) -> None:
    async with gateway_for(executor) as client:
        await client.wait_ready()
        readers = [read_slowly(client, number) for number in range(NUM_READERS)]
        await until(lambda: sum(num > 0 for num in client.num_generated()) == NUM_READERS)

        async def waiting() -> int:
            return read_pod((await client.http.get("/metrics")).text).num_waiting

        while await waiting():  # noqa: ASYNC110 - the load that says so is on its way
            await asyncio.sleep(0.05)
        num_looks = 0
        while num_looks < NUM_LOOKS:
            parked = await vllm_gauge(executor, WAITING)
            assert await waiting() == 0
            num_looks += parked > 0
        pod = read_pod((await client.http.get("/metrics")).text)
        running = await vllm_gauge(executor, RUNNING)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    assert pod.num_waiting == 0
    assert 0 <= pod.num_running <= NUM_SEATS
    assert 0 <= running <= NUM_SEATS
    assert pod.block_size > 0
    assert pod.num_blocks > 0
