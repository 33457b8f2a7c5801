"""Real executors with drafts: stock vLLM's tokens; what drafts exclude."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.executor_client import GatewayStream
from lab.stack.executor_process import ExecutorProcess
from tests.executor_stock import stock_answers
from tests.stock_requests import PROMPT, STREAM, TOO_LONG

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3_600)]

DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


def drafting(folder: Path, **settings: object) -> ExecutorProcess:
    return ExecutorProcess(
        folder / "executor.log",
        ENGINE_ARGS=json.dumps(["--speculative-config", json.dumps(DRAFTS)]),
        **settings,
    )


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExecutorProcess]:
    process = drafting(
        tmp_path_factory.mktemp("executor"),
        MAX_MODEL_LEN=2048,
        LAYERWISE_KV=True,
        KV_LAYERS_PER_GROUP=2,
        BLOCK_SIZE=32,
        NUM_GPU_BLOCKS_OVERRIDE=86,  # 2.5 groups of a request that is as long
    )
    with process.serving():
        yield process


async def test_a_prompt_larger_than_the_pool_gets_the_tokens_of_an_engine_without_drafts(
    gateway: GatewayStream,
) -> None:
    expected = await asyncio.to_thread(stock_answers, "layerwise")

    for name, request in TOO_LONG.items():
        answer = await gateway.ask(name, text=request["prompt"], sampling=request["sampling"])

        assert answer.ids == expected[name]["ids"]
        assert answer.text == expected[name]["text"]


@pytest.mark.parametrize("asked", [{"min_p": 0.1}, {"logit_bias": {300: 5.0}}])
async def test_what_vllm_does_not_do_beside_drafts_is_refused_by_name(
    asked: dict[str, Any], gateway: GatewayStream
) -> None:
    answer = await gateway.ask("bad", text=PROMPT, sampling={"max_tokens": 4, **asked})

    assert answer.reject_code == "INVALID_ARGUMENT"
    assert answer.rejected is not None
    assert answer.rejected.field == next(iter(asked))


@pytest.fixture
def plain_executor(tmp_path: Path) -> Iterator[ExecutorProcess]:
    """One with vLLM's own KV."""
    process = drafting(tmp_path)
    with process.serving():
        yield process


async def test_a_sampled_request_leaves_the_tokens_of_others_alone_with_vllms_kv(
    plain_executor: ExecutorProcess,
) -> None:
    """Neither is a step's sampling read from memory that nothing was written to."""
    expected = await asyncio.to_thread(stock_answers, "stream")
    names = ("greedy", "greedy-long")
    async with GatewayStream(plain_executor.address) as gateway:
        sampled = [
            gateway.ask(f"sampled-{n}", text=PROMPT, sampling={"temperature": 1, "max_tokens": 200})
            for n in range(2)
        ]
        greedy = [
            gateway.ask(name, text=STREAM[name]["prompt"], sampling=STREAM[name]["sampling"])
            for name in names
        ]
        *others, first, second = await asyncio.gather(*sampled, *greedy)

    assert [answer.ids for answer in (first, second)] == [expected[name]["ids"] for name in names]
    assert all(len(set(answer.ids)) > 10 for answer in others)
