"""The engine hears of every abort, whatever vLLM's output processor makes of it."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor

from lab.models import exactness_model
from services.executor.engine.aborts import Aborts
from services.executor.engine.collector import DeltaSink, Reporting, StepCollector
from services.executor.types import Delta
from services.generation.finish import FinishReason


@dataclass
class FakeCore:
    aborted: list[str] = field(default_factory=list)
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        self.heard.set()


@pytest.fixture
def outputs() -> OutputProcessor:
    return OutputProcessor(AutoTokenizer.from_pretrained(exactness_model()), log_stats=False)


def add(outputs: OutputProcessor, name: str, sink: DeltaSink, **sampling: Any) -> None:
    request = EngineCoreRequest(
        request_id=name,
        external_req_id=name,
        prompt_token_ids=[0, 300, 301],
        mm_features=None,
        sampling_params=SamplingParams(output_kind=RequestOutputKind.DELTA, **sampling),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    outputs.add_request(request, "prompt", None, 0, StepCollector(name, sink, Reporting()))


async def abort(outputs: OutputProcessor, *names: str) -> list[str]:
    core = FakeCore()
    Aborts(outputs, core).start(names)
    async with asyncio.timeout(60):
        await core.heard.wait()
    return core.aborted


async def test_a_scored_prompt_is_let_go_of_before_its_first_token(
    outputs: OutputProcessor,
) -> None:
    deltas: list[Delta] = []
    add(outputs, "echo", deltas.append, logprobs=1, prompt_logprobs=1)

    assert await abort(outputs, "echo") == ["echo"]
    assert deltas == [Delta((), FinishReason.CANCELLED)]
    assert not outputs.has_unfinished_requests()


@pytest.mark.logs("abort_not_answered")
async def test_a_collector_that_raises_keeps_no_abort_from_the_engine(
    outputs: OutputProcessor,
) -> None:
    def refuse(delta: Delta) -> None:
        raise RuntimeError("a bug")

    deltas: list[Delta] = []
    add(outputs, "first", deltas.append)
    add(outputs, "bad", refuse)
    add(outputs, "last", deltas.append)

    assert await abort(outputs, "first", "bad", "last") == ["first", "bad", "last"]
    assert deltas == [Delta((), FinishReason.CANCELLED)] * 2
    assert not outputs.has_unfinished_requests()
