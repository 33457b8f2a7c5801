"""Bodies as clients of OpenAI's and vLLM's servers send them."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from tests.client_bodies import CHAT, COMPLETIONS, SENT, Sent
from tests.fake_executor import MODEL, NUM_PROMPT_TOKENS, FakeExecutor, Script
from tests.gateways import JSON, Client, chat_body, gateway_for

IGNORED = "x-evenflow-ignored"


@pytest.mark.parametrize("sent", SENT, ids=[sent.client for sent in SENT])
async def test_what_a_client_sends_is_answered(client, executor, sent: Sent) -> None:
    response = await client.http.post(sent.path, json=sent.whole_body)

    assert response.status_code == 200, response.text
    named = response.headers.get(IGNORED, "")
    assert {*named.split(", ")} - {""} == sent.ignored
    assert executor.submits
    if sent.path == CHAT:
        roles = [turn["role"] for turn in sent.body["messages"]]
        assert [turn.role for turn in executor.submits[0].chat.messages] == roles


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


TURNS = [{"role": "user", "content": "Hi"}]
INPUT_OF: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURNS},
    COMPLETIONS: {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": TURNS},
}
# What each API calls the most tokens of an answer.
LIMITS = [
    (CHAT, "max_tokens"),
    (CHAT, "max_completion_tokens"),
    (COMPLETIONS, "max_tokens"),
    ("/v1/responses", "max_output_tokens"),
    ("/v1/messages", "max_tokens"),
]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("path", "name"), LIMITS)
async def test_an_answer_longer_than_the_context_leaves_is_cut_to_it(
    client, executor, path: str, name: str, streams: bool
) -> None:
    num_left = executor.max_model_len - NUM_PROMPT_TOKENS
    body = INPUT_OF[path] | {"model": MODEL, "stream": streams}

    cut = await client.http.post(path, json=body | {name: num_left + 1})
    whole = await client.http.post(path, json=body | {name: num_left})

    assert (cut.status_code, whole.status_code) == (200, 200)
    assert cut.headers["x-evenflow-clipped"] == f"{name}={num_left}"
    assert "x-evenflow-clipped" not in whole.headers


@pytest.mark.parametrize("number", ["2147483648", "1e300", "1" + "0" * 400], ids=len)
@pytest.mark.parametrize(("path", "name"), LIMITS)
async def test_no_number_of_tokens_is_too_large_to_be_cut(
    client, executor, path: str, name: str, number: str
) -> None:
    body = json.dumps(INPUT_OF[path] | {"model": MODEL, name: 0}).replace(": 0", f": {number}")

    cut = await client.http.post(path, content=body, headers=JSON)

    assert cut.status_code == 200, cut.text
    num_left = executor.max_model_len - NUM_PROMPT_TOKENS
    assert cut.headers["x-evenflow-clipped"] == f"{name}={num_left}"
    assert [submit.sampling.max_tokens for submit in executor.submits] == [2**31 - 1]


async def test_a_call_over_grpc_learns_what_its_answer_was_cut_to(client, executor) -> None:
    num_left = executor.max_model_len - NUM_PROMPT_TOKENS
    stub = pb_grpc.GatewayServiceStub(client.channel)

    async def finish(max_tokens: int) -> pb.Finish:
        sampling = gen.SamplingParams(max_tokens=max_tokens)
        request = pb.GenerateRequest(model=MODEL, text="Hi", sampling=sampling)
        *_, last = [part async for part in stub.Generate(request)]
        return last.finish

    cut, whole = await finish(num_left + 1), await finish(num_left)

    assert cut.clipped_max_tokens == num_left
    assert not whole.HasField("clipped_max_tokens")


ADVICE = gen.SamplingParams(
    temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05, max_tokens=77
)


@pytest.fixture
async def advised() -> AsyncIterator[tuple[Client, FakeExecutor]]:
    executor = FakeExecutor(default_sampling=ADVICE)
    await executor.start()
    async with gateway_for(executor) as client:
        await client.wait_ready()
        yield client, executor
    await executor.kill()


async def test_what_a_client_does_not_name_is_as_the_model_s_makers_advise(advised) -> None:
    client, executor = advised
    completion = {"model": MODEL, "prompt": "Hi", "temperature": 1, "top_k": -1}

    await client.http.post(CHAT, json=chat_body())
    await client.http.post(CHAT, json=chat_body(temperature=0, max_tokens=5))
    await client.http.post(COMPLETIONS, json=completion)

    advice = {field.name: value for field, value in ADVICE.ListFields()}
    assert [submit.sampling for submit in executor.submits] == [
        ADVICE,
        gen.SamplingParams(**advice | {"temperature": 0, "max_tokens": 5}),
        gen.SamplingParams(top_p=0.95, repetition_penalty=1.05),
    ]


async def test_grpc_clients_get_the_same_advice_and_zero_is_a_value(advised) -> None:
    client, executor = advised
    stub = pb_grpc.GatewayServiceStub(client.channel)
    turns = [gen.ChatMessage(role="user", content="Hi")]
    named = gen.SamplingParams(top_k=0, max_tokens=5)

    async for _ in stub.Chat(pb.ChatRequest(model=MODEL, messages=turns)):
        pass
    async for _ in stub.Generate(pb.GenerateRequest(model=MODEL, text="Hi", sampling=named)):
        pass

    assert [submit.sampling for submit in executor.submits] == [
        ADVICE,
        gen.SamplingParams(temperature=0.6, top_p=0.95, repetition_penalty=1.05, max_tokens=5),
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_tells_how_much_of_the_prompts_was_cached(client, executor, stream) -> None:
    executor.script = Script(num_cached_tokens=5)
    body = {"model": MODEL, "prompt": ["a", "b"], "n": 2, "stream": stream}

    response = await client.http.post(
        COMPLETIONS, json=body | {"stream_options": {"include_usage": True}}
    )

    *_, last = (line for line in response.text.split("\n") if line and "[DONE]" not in line)
    usage = json.loads(last.removeprefix("data: "))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 10}  # each prompt once


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_each_event_tells_the_counts_so_far_if_asked_to(client, executor, path) -> None:
    executor.script = Script(texts=["a", "", "b"])  # the token without text has no event
    body = chat_body() if path == CHAT else {"model": MODEL, "prompt": "Hi"}
    options = {"include_usage": True, "continuous_usage_stats": True}

    response = await client.http.post(path, json=body | {"stream": True, "stream_options": options})

    events = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    usages = [json.loads(event)["usage"] for event in events[:-1]]
    begun = [0] if path == CHAT else []  # the role
    assert [usage["completion_tokens"] for usage in usages] == [*begun, 1, 3, 3, 3]
    for usage in usages:
        assert usage["prompt_tokens"] == NUM_PROMPT_TOKENS
        assert usage["total_tokens"] == NUM_PROMPT_TOKENS + usage["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_alone_comes_back_where_no_answer_is_wanted(
    client, executor, stream
) -> None:
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 0, "stream": stream}

    refused = await client.http.post(COMPLETIONS, json=body)
    options = {"include_usage": True}
    response = await client.http.post(
        COMPLETIONS, json=body | {"echo": True, "logprobs": 1, "stream_options": options}
    )

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    (submit,) = executor.submits
    assert submit.sampling.max_tokens == 1  # no less can be generated
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "Hi"
    assert choices[0]["logprobs"]["tokens"] == ["H", "i"]
    assert choices[-1]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 0


PAGE = "https://chat.example"
KEY = "a-key-of-the-page-of-thirty-two-characters"


@pytest.mark.parametrize("origins", [PAGE, f"http://localhost:3000,{PAGE}", "*"])
async def test_a_page_of_an_allowed_origin_may_call(executor, tmp_path, origins) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nname = "page"\nkey = "{KEY}"\n')
    asks = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with gateway_for(executor, cors_origins=origins, api_keys_file=keys) as client:
        await client.wait_ready()
        preflight = await client.http.options(CHAT, headers=asks)
        refused = await client.http.post(CHAT, json=chat_body(), headers={"origin": PAGE})
        answer = await client.http.post(
            CHAT,
            json=chat_body(stream=True),
            headers={"origin": PAGE, "authorization": f"Bearer {KEY}"},
        )

    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    assert (refused.status_code, answer.status_code) == (401, 200)
    allowed = "*" if origins == "*" else PAGE
    for response in (refused, answer):
        assert response.headers["access-control-allow-origin"] == allowed
        assert "x-request-id" in response.headers["access-control-expose-headers"]


@pytest.mark.parametrize("origins", ["", "https://other.example"])
async def test_a_page_of_any_other_origin_may_not(executor, origins) -> None:
    asks = {"origin": PAGE, "access-control-request-method": "POST"}
    async with gateway_for(executor, cors_origins=origins) as client:
        await client.wait_ready()
        preflight = await client.http.options(CHAT, headers=asks)
        answer = await client.http.post(CHAT, json=chat_body(), headers={"origin": PAGE})

    assert preflight.status_code >= 400
    assert "access-control-allow-origin" not in answer.headers
