"""Readers are dealt to the benchmark's requests, and to nothing else."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput, RequestFuncOutput

from cli.client.answer import num_tokens_told
from cli.readers import Readers, headers_of
from services.pacing.types import NO_SERVICE_LEVEL, ServiceLevel

LEVELS = [
    ServiceLevel(consumption_rate_tps=8.0, pace_tail=True),
    ServiceLevel(slo_ttft_s=1.5, slo_tbt_s=0.1, slo_tpot_s=0.0625),
]


@dataclass
class FakeRequestFunc:
    """Notes what it was asked, and says what each request came to."""

    outcome: RequestFuncOutput
    asked: list[Any] = field(default_factory=list)

    async def __call__(self, request: Any, session: Any, pbar: Any = None) -> Any:
        self.asked.append(request)
        return replace(self.outcome)


def make_input(**overrides: Any) -> RequestFuncInput:
    fields: dict[str, Any] = {
        "prompt": "hi", "api_url": "u", "prompt_len": 1, "output_len": 1, "model": "m",
        "request_id": "id",
    }  # fmt: skip
    return RequestFuncInput(**{**fields, **overrides})


async def asked_of(levels: list[ServiceLevel], backend: str, *inputs: RequestFuncInput) -> Any:
    func = FakeRequestFunc(RequestFuncOutput())
    read = Readers(levels, backend).reading(func)
    for one in inputs:
        await read(request_func_input=one, session=None, pbar=None)
    return func.asked


def test_a_promise_is_written_as_the_gateway_reads_it() -> None:
    assert headers_of(LEVELS[0]) == {"x-consumption-rate-tps": "8"}
    assert headers_of(LEVELS[1]) == {
        "x-slo-ttft-ms": "1500", "x-slo-tbt-ms": "100", "x-slo-tpot-ms": "62.5",
    }  # fmt: skip
    assert headers_of(NO_SERVICE_LEVEL) == {}


async def test_promises_are_dealt_in_turn() -> None:
    asked = await asked_of(LEVELS, "openai-chat", *(make_input() for _ in range(3)))

    assert [one.extra_headers for one in asked] == [
        headers_of(LEVELS[0]), headers_of(LEVELS[1]), headers_of(LEVELS[0]),
    ]  # fmt: skip
    assert asked[0].extra_body == {"evenflow": {"pace_tail": True}, "logprobs": True}
    assert asked[1].extra_body == {"logprobs": True}


async def test_a_completion_asks_for_probabilities_in_its_own_form() -> None:
    told, own = await asked_of(LEVELS[:1], "openai", make_input(), make_input(logprobs=3))

    assert told.extra_body["logprobs"] == 0
    assert "logprobs" not in own.extra_body  # the user asked for some already


async def test_what_the_user_sends_along_stays_and_wins() -> None:
    own = make_input(extra_headers={"x-own": "1"}, extra_body={"logprobs": False, "top_k": 5})

    (asked,) = await asked_of(LEVELS[:1], "openai-chat", own)

    assert asked.extra_headers == {"x-own": "1", "x-consumption-rate-tps": "8"}
    assert asked.extra_body == {
        "evenflow": {"pace_tail": True}, "logprobs": False, "top_k": 5,
    }  # fmt: skip


async def test_without_a_promise_the_request_is_vllms_own() -> None:
    (asked,) = await asked_of([NO_SERVICE_LEVEL], "openai-chat", make_input())

    assert (asked.extra_headers, asked.extra_body) == ({}, {})


async def test_the_benchmarks_own_checks_take_no_readers_turn() -> None:
    check = make_input(request_id=None)

    asked = await asked_of(LEVELS, "openai-chat", check, make_input())

    assert asked[0] is check
    assert asked[1].extra_headers == headers_of(LEVELS[0])


async def test_a_failure_is_told_and_not_heard() -> None:
    readers = Readers(LEVELS, "openai-chat")
    failed = RequestFuncOutput(error="Traceback\nConnectionError: gone\n")

    await readers.reading(FakeRequestFunc(failed))(make_input(), None)

    assert readers.heard == []
    assert readers.failures == ["ConnectionError: gone"]


class FakeSession:
    """A session whose every answer is the same stream of choices."""

    status, reason = 200, "OK"

    def __init__(self, *choices: dict[str, Any]) -> None:
        self._choices = choices

    @asynccontextmanager
    async def post(self, **options: Any) -> AsyncIterator["FakeSession"]:
        yield self

    @property
    def content(self) -> "FakeSession":
        return self

    async def iter_any(self) -> AsyncIterator[bytes]:
        for choice in self._choices:
            yield f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


async def ask_and_read(request: Any, session: Any, pbar: Any = None) -> RequestFuncOutput:
    async with session.post(url=request.api_url) as response:
        async for _ in response.content.iter_any():
            pass
    return RequestFuncOutput(success=True, output_tokens=3)


async def test_what_is_heard_tells_thoughts_from_the_answer() -> None:
    readers = Readers(LEVELS, "openai-chat")
    session = FakeSession(
        {"delta": {"reasoning_content": "hm"}},
        {"delta": {"reasoning_content": "so"}},
        {"delta": {"content": "ab"}},
    )

    await readers.reading(ask_and_read)(make_input(), session)

    (heard,) = readers.heard
    assert (len(heard.arrived_s), heard.num_thoughts, len(heard.read_s)) == (3, 2, 1)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        pytest.param({"delta": {"role": "assistant", "content": ""}}, 0, id="role"),
        pytest.param({"delta": {}, "finish_reason": "stop"}, 0, id="end"),
        pytest.param({"delta": {"content": "ab"}}, 1, id="text"),
        pytest.param({"delta": {"reasoning_content": "ab"}}, 1, id="thought"),
        pytest.param(
            {"delta": {"content": "ab"}, "logprobs": {"content": [{}, {}]}}, 2, id="merged"
        ),
        pytest.param({"delta": {"content": ""}, "logprobs": {"content": [{}]}}, 1, id="no-text"),
        pytest.param({"text": "ab", "logprobs": None}, 1, id="completion"),
        pytest.param({"text": "", "logprobs": {"tokens": [""]}}, 1, id="completion-no-text"),
        pytest.param({"text": "", "finish_reason": "stop"}, 0, id="completion-end"),
    ],
)
def test_tokens_are_counted_by_what_an_event_tells(choice: dict[str, Any], expected: int) -> None:
    assert num_tokens_told(choice) == expected
