"""Streams through a gateway outlive the real executor that answers them: killed, or shut down."""

import asyncio
import itertools
import os
import re
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from lab.stack.executor_process import ExecutorProcess
from lab.stack.processes import stopped, wait_until
from services.gateway.executors import routing
from services.gateway.executors.routing import Candidate
from tests.gateways import Client, gateway_for, until

pytestmark = pytest.mark.timeout(3_600)

NUM_TOKENS = 600  # far more than the first answers have when the last one begins
PROMPT = "Tell me of the sea, and of those who go there."
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "minLength": 150}}}
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1, "seed": 5, "logprobs": True, "top_logprobs": 3},
    {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": {"name": "s"}}},
)
ASKED[-1]["response_format"]["json_schema"]["schema"] = SCHEMA


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ExecutorProcess, ...]]:
    """Two executors of one model."""
    folder = tmp_path_factory.mktemp("pair")
    processes = tuple(ExecutorProcess(folder / f"{number}.log") for number in range(2))
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.wait_serving()
        yield processes
    finally:
        for process in processes:
            process.stop()


@pytest.fixture(autouse=True)
def by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the executors be homes by turns: all ask the same, and one alone has no room for all."""
    turns = itertools.count()

    def home_of(_: bytes, candidates: Sequence[Candidate]) -> Candidate:
        by_address = sorted(candidates, key=lambda one: one.address)
        return by_address[next(turns) % len(by_address)]

    monkeypatch.setattr(routing, "_home", home_of)


async def ask(client: Client, number: int, *, is_streamed: bool) -> str:
    """Return all that a client gets, but for when."""
    (model,) = client.gateway.dispatcher.models()
    body = ASKED[number] | {
        "model": model.model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": "response_format" not in ASKED[number],
        "stream": is_streamed,
        "evenflow": {"slo_tbt_ms": 1},
    }
    headers = {"x-request-id": f"r{number}"}
    answer = await client.http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return re.sub(r'"created":\d+', "", answer.text)


def ask_all(client: Client) -> list["asyncio.Task[str]"]:
    """Ask for each kind, twice streamed and once whole."""
    return [
        asyncio.create_task(ask(client, number, is_streamed=is_streamed))
        for number in range(len(ASKED))
        for is_streamed in (True, True, False)
    ]


def are_underway(client: Client, number: int) -> bool:
    """Say whether half of so many answers have tokens: a form may be compiled for long, and the
    others would have come to their ends.
    """
    return sum(map(bool, client.num_generated())) >= number / 2


def without_moves(answer: str) -> tuple[str, bool]:
    """Return an answer without what it says of moves, and whether it says that it moved."""
    told = re.sub(r',"evenflow":\{"moves":1,"continued":"identical"\}', "", answer)
    assert '"moves"' not in told
    return told, told != answer


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "shut-down"])
async def test_answers_are_what_they_would_have_been(
    pair: tuple[ExecutorProcess, ...], how: signal.Signals
) -> None:
    first, _ = pair
    async with gateway_for(*pair) as client:
        links = client.gateway.dispatcher.placing._links.values()
        await until(lambda: all(link.candidate() for link in links))
        expected = [await task for task in ask_all(client)]

        answers = ask_all(client)
        await until(lambda: are_underway(client, len(answers)))
        os.kill(first.process.pid, how)
        got = [without_moves(await answer) for answer in answers]

        assert [answer for answer, _ in got] == expected
        assert any(has_moved for _, has_moved in got)
        wait_until(lambda: first.process.poll() is not None, "the executor ends")
    first.start()
    first.wait_serving()


async def test_answers_of_a_hanging_engine_move_and_it_is_taken_back(
    pair: tuple[ExecutorProcess, ...],
) -> None:
    first, _ = pair
    async with gateway_for(*pair, engine_stall_s=10.0) as client:
        links = client.gateway.dispatcher.placing._links.values()
        await until(lambda: all(link.candidate() for link in links))
        expected = [await task for task in ask_all(client)]

        answers = ask_all(client)
        await until(lambda: are_underway(client, len(answers)))
        with stopped(first.engine_processes()):
            got = [without_moves(await answer) for answer in answers]
            taken = [link.candidate() is not None for link in links]

        assert [answer for answer, _ in got] == expected
        assert any(has_moved for _, has_moved in got)
        assert taken == [False, True]
        await until(lambda: all(link.candidate() for link in links))
