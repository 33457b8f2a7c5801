"""Bodies as large as they may be, for as many answers as there may be."""

import asyncio
import json
import time
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest

from evenflow.executor.v1 import executor_pb2 as pb
from tests.fake_executor import MODEL, Script
from tests.gateways import JSON, chat_body

URL = "/v1/chat/completions"
LIMIT = 1 << 20  # of a body


def conversation(num_messages: int, **parameters: object) -> bytes:
    """Return a body of nearly the largest size."""
    content = "x" * ((LIMIT - 1_000) // num_messages - 32)
    messages = [{"role": "user", "content": content}] * num_messages
    body = json.dumps(chat_body(messages=messages, **parameters), separators=(",", ":")).encode()
    assert 0.9 * LIMIT < len(body) <= LIMIT
    return body


async def test_a_large_prompt_goes_to_the_executor_once_for_all_its_answers(
    client, executor
) -> None:
    taken = await client.http.post(URL, content=conversation(4_000, n=128), headers=JSON)

    assert taken.status_code == 200
    assert len(taken.json()["choices"]) == 128
    assert executor.num_answers == [128]


async def test_each_prompt_of_several_goes_to_an_executor_with_its_answers(
    client, executor
) -> None:
    body = {"model": MODEL, "prompt": ["a", "b"], "n": 3, "seed": 7}
    taken = await client.http.post("/v1/completions", json=body)

    assert taken.status_code == 200
    assert executor.num_answers == [3, 3]
    asked = [(submit.text, submit.sampling.seed) for submit in executor.submits]
    assert asked == [(text, seed) for text in "ab" for seed in (7, 8, 9)]


async def test_answers_that_one_executor_refuses_go_on_together(client, executor) -> None:
    """What it says of the second of three is the end of all of them there."""
    refusal = Script(reject=pb.Rejected(code=pb.REJECT_CODE_OVERLOADED, message="full"))
    executor.script_for = lambda submit: refusal if ".1" in submit.request_id else executor.script

    refused = await client.http.post(URL, json=chat_body(n=3))

    assert refused.status_code == 429
    await executor.until(lambda: len(executor.aborted) == 2)
    await client.wait_idle()


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
    """Executor and client are in this loop too; the best of some calls, for the machine's sake."""
    body = conversation(num_messages, n=num_answers)
    lags_s = [await lag_s(client.http.post(URL, content=body, headers=JSON)) for _ in range(4)]

    assert min(lags_s) < 0.05, lags_s


async def lag_s(asking: Coroutine[Any, Any, httpx.Response]) -> float:
    """Return the longest time that the loop kept others waiting until the answer was there."""
    longest_s, asked = 0.0, asyncio.create_task(asking)
    while not asked.done():
        began_s = time.monotonic()
        await asyncio.sleep(0)
        longest_s = max(longest_s, time.monotonic() - began_s)
    assert asked.result().status_code in (200, 400)
    return longest_s
