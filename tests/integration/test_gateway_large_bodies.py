"""Bodies as large as they may be, for as many answers as there may be."""

import asyncio
import json
import time

import pytest

from tests.fake_executor import MODEL
from tests.gateways import chat_body

URL = "/v1/chat/completions"
LIMIT = 1 << 20  # of a body


def conversation(num_messages: int, **parameters: object) -> bytes:
    """Return a body of nearly the largest size."""
    content = "x" * ((LIMIT - 1_000) // num_messages - 32)
    messages = [{"role": "user", "content": content}] * num_messages
    body = json.dumps(chat_body(messages=messages, **parameters), separators=(",", ":")).encode()
    assert 0.9 * LIMIT < len(body) <= LIMIT
    return body


async def test_a_large_body_for_many_answers_is_refused_before_the_executor(
    client, executor
) -> None:
    refused = await client.http.post(URL, content=conversation(4_000, n=128))
    taken = await client.http.post(URL, content=conversation(4_000, n=4))

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    assert taken.status_code == 200
    assert len(executor.submits) == 4


@pytest.mark.parametrize("path", [URL, "/tokenize"])
async def test_a_conversation_has_so_many_messages_at_most(client, executor, path) -> None:
    messages = [{"role": "user", "content": "x"}] * 4_097
    refused = await client.http.post(path, json={"model": MODEL, "messages": messages})

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert executor.submits == []


@pytest.mark.nightly
@pytest.mark.parametrize("num_messages", [1, 4_000, 28_000])
@pytest.mark.parametrize("num_answers", [1, 4, 128])
async def test_no_turn_of_the_loop_takes_long(client, num_messages, num_answers) -> None:
    """Executor and client are in this process too: their work counts, other processes' does not."""
    longest_s, body = 0.0, conversation(num_messages, n=num_answers)
    asking = asyncio.create_task(client.http.post(URL, content=body))
    while not asking.done():
        began_s = time.process_time()
        await asyncio.sleep(0)
        longest_s = max(longest_s, time.process_time() - began_s)

    assert (await asking).status_code in (200, 400)
    assert longest_s < 0.15
