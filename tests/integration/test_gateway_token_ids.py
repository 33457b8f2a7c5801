"""The ids of tokens, from the executor to clients that ask for them."""

import json
from typing import Any

import httpx
import pytest

from evenflow.executor.v1 import executor_pb2
from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from services.gateway.http import answers
from tests.fake_executor import MODEL, NUM_PROMPT_TOKENS, Script
from tests.gateways import chat_body

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT_IDS = [*range(NUM_PROMPT_TOKENS)]
OWN_IDS = [7, 8]


def completion_body(**overrides: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": ["Hi", OWN_IDS], "return_token_ids": True} | overrides


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    events = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


async def test_a_chat_tells_the_ids_of_prompt_and_answers(client, executor) -> None:
    executor.script = Script(texts=["é", ""])
    body = chat_body(return_token_ids=True, n=2)

    whole = (await client.http.post(CHAT, json=body)).json()
    stream = chunks_of(await client.http.post(CHAT, json=body | {"stream": True}))

    assert whole["prompt_token_ids"] == PROMPT_IDS
    assert [choice["token_ids"] for choice in whole["choices"]] == [[100, 101]] * 2
    for index in range(2):
        mine = [chunk for chunk in stream if chunk["choices"][0]["index"] == index]
        first, *rest = mine
        assert first["prompt_token_ids"] == PROMPT_IDS
        assert not any("prompt_token_ids" in chunk for chunk in rest)
        assert [chunk["choices"][0]["token_ids"] for chunk in mine] == [[], [100], [101], []]
    submits = {(submit.returns_prompt_ids, submit.echo) for submit in executor.submits}
    assert submits == {(True, False)}


@pytest.mark.parametrize("echo", [False, True])
async def test_completions_tell_the_ids_of_each_prompt_and_answer(client, executor, echo) -> None:
    executor.script = Script(texts=["é", ""])
    body = completion_body(echo=echo)

    whole = (await client.http.post(COMPLETIONS, json=body)).json()
    stream = chunks_of(await client.http.post(COMPLETIONS, json=body | {"stream": True}))

    given_back = ["Hi", "[7, 8]"] if echo else ["", ""]
    for index, ids in enumerate([PROMPT_IDS, OWN_IDS]):
        choice = whole["choices"][index]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids, [100, 101])
        assert choice["text"] == f"{given_back[index]}é"
        first, *rest = [c for chunk in stream for c in chunk["choices"] if c["index"] == index]
        assert (first["prompt_token_ids"], first["text"]) == (ids, given_back[index])
        assert [choice["token_ids"] for choice in (first, *rest)] == [[], [100], [101], []]
        assert not any("prompt_token_ids" in choice for choice in rest)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_alone_has_ids_and_its_answer_none(client, stream) -> None:
    body = completion_body(prompt="Hi", max_tokens=0, echo=True, stream=stream)

    response = await client.http.post(COMPLETIONS, json=body)

    chunks = chunks_of(response) if stream else [response.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[0]["prompt_token_ids"] == PROMPT_IDS
    assert [choice["token_ids"] for choice in choices] == [[]] * len(choices)


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_of_an_answer_whose_reasoning_is_not_told_are_not(
    client, executor, stream
) -> None:
    executor.script = Script(texts=[executor_pb2.Token(text=""), "so"], num_reasoning_tokens=1)
    body = chat_body(return_token_ids=True, include_reasoning=False, stream=stream)

    response = await client.http.post(CHAT, json=body)

    assert '"token_ids"' not in response.text
    first = chunks_of(response)[0] if stream else response.json()
    assert first["prompt_token_ids"] == PROMPT_IDS


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
async def test_nobody_gets_ids_without_asking(client, executor, path, stream) -> None:
    body = chat_body() if path == CHAT else {"model": MODEL, "prompt": "Hi", "echo": True}

    for asked in ({}, {"return_token_ids": False}, {"return_token_ids": None}):
        response = await client.http.post(path, json=body | asked | {"stream": stream})
        assert response.status_code == 200
        assert "token_ids" not in response.text

    assert not any(submit.returns_prompt_ids for submit in executor.submits)


@pytest.mark.parametrize(("most", "status"), [(20, 200), (19, 400)])
async def test_ids_of_prompts_count_for_what_is_kept_of_whole_answers(
    client, monkeypatch, most, status
) -> None:
    monkeypatch.setattr(answers, "MAX_WHOLE_ENTRIES", most)  # two of seven ids and three tokens

    whole = await client.http.post(CHAT, json=chat_body(return_token_ids=True, n=2))
    await client.wait_idle()

    assert whole.status_code == status


async def test_grpc_calls_get_the_ids_of_their_prompts(client, executor) -> None:
    stub = pb_grpc.GatewayServiceStub(client.channel)
    asked: dict[str, Any] = {"model": MODEL, "returns_prompt_ids": True}
    turns = [gen.ChatMessage(role="user", content="Hi")]
    calls = [
        (stub.Generate(pb.GenerateRequest(text="Hi", **asked)), ""),
        (stub.Generate(pb.GenerateRequest(text="Hi", echo=True, **asked)), "Hi"),
        (stub.Chat(pb.ChatRequest(messages=turns, **asked)), ""),
    ]

    for call, text in calls:
        first, *rest = [part async for part in call]
        assert first.prompt == gen.EchoedPrompt(text=text, token_ids=PROMPT_IDS)
        assert not any(part.HasField("prompt") for part in rest)
        assert [token.id for part in (first, *rest) for token in part.tokens] == [100, 101, 102]


async def test_grpc_calls_that_do_not_ask_get_no_prompt(client, executor) -> None:
    stub = pb_grpc.GatewayServiceStub(client.channel)
    turns = [gen.ChatMessage(role="user", content="Hi")]

    for call in (
        stub.Generate(pb.GenerateRequest(model=MODEL, text="Hi")),
        stub.Chat(pb.ChatRequest(model=MODEL, messages=turns)),
    ):
        assert not any([part.HasField("prompt") async for part in call])
