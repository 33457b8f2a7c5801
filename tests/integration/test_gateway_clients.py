"""Bodies as clients of OpenAI's and vLLM's servers send them."""

from typing import Any

import pytest

from tests.gateways import chat_body

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
IGNORED = "x-evenflow-ignored"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_without_effect_is_named_in_a_header(client, executor, stream) -> None:
    body = chat_body(stream=stream, user="u", metadata={"a": "b"})

    response = await client.http.post(CHAT, json=body)

    assert (response.status_code, response.headers[IGNORED]) == (200, "metadata, user")
    assert len(executor.submits) == 1


async def test_a_body_without_such_parameters_gets_no_such_header(client) -> None:
    response = await client.http.post(CHAT, json=chat_body())

    assert IGNORED not in response.headers


async def test_a_strict_body_is_refused_for_what_is_without_effect(client, executor) -> None:
    body: dict[str, Any] = chat_body(user="u", evenflow={"strict": True})

    response = await client.http.post(CHAT, json=body)

    assert (response.status_code, response.json()["error"]["param"]) == (400, "user")
    assert not executor.submits


async def test_an_answer_may_be_asked_to_be_as_long_as_the_context(client, executor) -> None:
    body = chat_body(max_tokens=executor.max_model_len)

    assert (await client.http.post(CHAT, json=body)).status_code == 200
    assert executor.submits[0].sampling.max_tokens == executor.max_model_len
