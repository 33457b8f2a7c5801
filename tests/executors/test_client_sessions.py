"""Recorded sessions of clients before a real model: its template, tokenizer and parsers take all.

How an answer ends is `tests/clients/test_sessions.py`'s to say; here each request is let go as soon
as it is taken, because a small model would write until its context is full.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from demo.model import demo_model
from lab.stack.executor_process import ExecutorProcess
from tests.client_session import SESSIONS, Session, Step
from tests.fake_executor import MODEL
from tests.gateways import Client, gateway_for

CONTEXT = 8192  # tokens, the most that the model has

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3_600)]


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExecutorProcess]:
    process = ExecutorProcess(
        tmp_path_factory.mktemp("executor") / "executor.log",
        MODEL=demo_model(),
        SERVED_MODEL_NAME=MODEL,
        MAX_MODEL_LEN=CONTEXT,
        TOOL_CALL_PARSER="hermes",
        KV_CACHE_MEMORY_BYTES=1 << 30,
    )
    with process.serving():
        yield process


@pytest.fixture
async def client(executor: ExecutorProcess) -> AsyncIterator[Client]:
    async with gateway_for(executor) as client:
        await client.wait_ready()
        yield client


def sessions() -> list[Path]:
    return [
        path for path in sorted(SESSIONS.glob("*.json")) if CONTEXT in Session.read(path).contexts
    ]


@pytest.mark.parametrize("path", sessions(), ids=lambda path: path.stem)
async def test_each_request_of_a_session_is_taken(client, path: Path) -> None:
    refusals = [await refusal_of(step, client.http) for step in Session.read(path).steps]

    assert [refusal for refusal in refusals if refusal] == []


async def refusal_of(step: Step, http: httpx.AsyncClient) -> str | None:
    """Send the step and let go of it; return the words with which it is refused, if it is."""
    content = step.content(stream=True)
    async with http.stream(step.method, step.path, headers=step.headers, content=content) as answer:
        if answer.is_success:
            return None
        await answer.aread()
        return f"{step.method} {step.path}: {answer.status_code} {answer.text}"
