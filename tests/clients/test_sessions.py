"""Recorded sessions of clients against the gateway: each request is answered to its end."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.client_session import SESSIONS, Session, Step, model_that_calls
from tests.fake_executor import FakeExecutor
from tests.gateways import Client, gateway_for
from tests.record_client import SECRET

FILES = sorted(SESSIONS.glob("*.json"))
LARGEST_FILE_BYTES = 100_000
LAST_EVENT = {
    "/v1/chat/completions": "[DONE]",
    "/v1/responses": "response.completed",
    "/v1/messages": "message_stop",
}
REPLAYS = [
    pytest.param(path, context, id=f"{path.stem}-{context // 1024}k")
    for path in FILES
    for context in Session.read(path).contexts
]


@pytest.fixture
async def replayed(path: Path, context: int) -> AsyncIterator[tuple[Client, Session]]:
    session = Session.read(path)
    executor = FakeExecutor(max_model_len=context)
    executor.script_for = model_that_calls(session.call)
    await executor.start()
    async with gateway_for(executor) as client:
        await client.wait_ready()
        yield client, session
    await executor.kill()


@pytest.mark.parametrize(("path", "context"), REPLAYS)
async def test_a_session_is_answered_to_its_end(replayed) -> None:
    client, session = replayed

    faults = [await fault_of(step, client.http) for step in session.steps]

    assert [fault for fault in faults if fault] == []


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_session_is_small_and_holds_no_secret(path: Path) -> None:
    assert path.stat().st_size < LARGEST_FILE_BYTES
    for step in Session.read(path).steps:
        assert {step.headers.get(name, "unused") for name in SECRET} == {"unused"}


async def fault_of(step: Step, http: httpx.AsyncClient) -> str | None:
    """Send the step; return what is wrong with its answer, and with which words it comes."""
    answer = await http.request(
        step.method, step.path, headers=step.headers, content=step.content()
    )
    if not answer.is_success:
        return f"{step.method} {step.path}: {answer.status_code} {answer.text}"
    if step.body is None or not step.body.get("stream"):
        return None
    expected, last = LAST_EVENT[answer.url.path], last_event(answer.text)
    return None if last == expected else f"{step.path}: ends with {last}"


def last_event(stream: str) -> str:
    """Return the type of the last event that a stream of any of the APIs holds."""
    data = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data")]
    return data[-1] if data[-1] == "[DONE]" else str(json.loads(data[-1]).get("type"))
