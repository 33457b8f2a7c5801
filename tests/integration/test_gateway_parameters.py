"""The parameters of the OpenAI API, from HTTP and gRPC to the executor and back."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from grpc import aio

from evenflow.executor.v1 import executor_pb2
from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from services.kit.rpc import name_of_request
from tests.fake_executor import (
    MODEL,
    NUM_PROMPT_TOKENS,
    UNRENDERABLE,
    FakeExecutor,
    Script,
    make_logprobs,
    make_prompt,
)
from tests.gateways import JSON, chat_body, gateway_for, stream_body, until


def completion_body(**overrides: object) -> dict[str, object]:
    body: dict[str, object] = {"model": MODEL, "prompt": "Hi"}
    return body | overrides


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the chunks of a stream that ended well."""
    events = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


EVERYTHING = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 40,
    "min_p": 0.125,
    "presence_penalty": -1.5,
    "frequency_penalty": 0.75,
    "repetition_penalty": 1.25,
    "min_tokens": 2,
    "max_tokens": 9,
    "stop": ["a", "b"],
    "stop_token_ids": [3, 4],
    "ignore_eos": True,
    "seed": -3,
    "bad_words": ["c"],
    "allowed_token_ids": [5, 6],
}
SCHEMA = {"type": "object", "properties": {"a": {"const": None}}}


@pytest.mark.parametrize(
    ("text", "status"), [("4.0", 200), ("4e0", 200), ("4.5", 400), ("1e10", 200)]
)
async def test_a_whole_number_is_an_integer_however_it_is_written(
    client, executor, text, status
) -> None:
    body = json.dumps(chat_body(max_tokens=0)).replace('"max_tokens": 0', f'"max_tokens": {text}')

    answer = await client.http.post("/v1/chat/completions", content=body, headers=JSON)

    assert answer.status_code == status
    taken = [min(int(float(text)), 2**31 - 1)] if status == 200 else []
    assert [submit.sampling.max_tokens for submit in executor.submits] == taken


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
    ],
)
async def test_requests_with_a_salt_share_cached_prefixes_with_their_like(
    client, executor, path, asked
) -> None:
    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}):
        answer = await client.http.post(path, json={"model": MODEL, **asked, **salt})
        assert answer.status_code == 200, answer.text

    none, first, second, other = (submit.cache_salt for submit in executor.submits)
    assert (none, first == second, len({none, first, other})) == ("", True, 3)


@pytest.mark.parametrize("name", ["prompt_logprobs", "truncate_prompt_tokens"])
async def test_what_cannot_be_had_is_refused_with_what_can(client, name) -> None:
    answer = await client.http.post("/v1/completions", json=completion_body(**{name: 1}))

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name)
    assert error["message"].startswith(f"{name}: not supported: ")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_every_sampling_parameter_reaches_the_executor(client, executor, path) -> None:
    is_chat = "chat" in path
    asked: dict[str, object] = {
        **EVERYTHING,
        "logit_bias": {"5": -100, "7": 0.5},
        "priority": -2,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
        },
    }
    if is_chat:
        body = chat_body(**asked, logprobs=True, top_logprobs=4)
    else:
        body = completion_body(**asked, logprobs=4, echo=True)

    response = await client.http.post(path, json=body)

    assert response.status_code == 200
    (submit,) = executor.submits
    assert submit.sampling == gen.SamplingParams(
        **EVERYTHING,
        keep_special_tokens=True,
        include_stop=True,
        logit_bias={5: -100, 7: 0.5},
        logprobs=4,
        structured_outputs=gen.StructuredOutputs(json_schema=json.dumps(SCHEMA)),
    )
    assert (submit.priority, submit.echo) == (-2, not is_chat)


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}),
    ],
)
async def test_every_api_takes_a_priority_in_our_object_or_beside_it(
    client, executor, path, prompt
) -> None:
    for asked in ({"priority": 4}, {"evenflow": {"priority": 7}, "priority": 4}):
        answer = await client.http.post(path, json={"model": MODEL, **prompt, **asked})
        assert answer.status_code == 200, answer.text
        assert "x-evenflow-ignored" not in answer.headers

    assert [submit.priority for submit in executor.submits] == [4, 7]


async def test_every_sampling_field_of_the_grpc_edge_reaches_the_executor(client, executor) -> None:
    stub = pb_grpc.GatewayServiceStub(client.channel)
    sampling = gen.SamplingParams(
        **EVERYTHING,
        logit_bias={5: -100},
        logprobs=4,
        structured_outputs=gen.StructuredOutputs(choice=gen.Choices(texts=["a", "b"])),
    )

    generate = pb.GenerateRequest(model=MODEL, text="Hi", sampling=sampling, echo=True, priority=3)
    first, *others = [part async for part in stub.Generate(generate)]
    chat = pb.ChatRequest(
        model=MODEL,
        messages=[gen.ChatMessage(role="user", content="Hi")],
        sampling=sampling,
        priority=-3,
    )
    answer = [part async for part in stub.Chat(chat)]

    assert [submit.sampling for submit in executor.submits] == [sampling, sampling]
    assert [submit.priority for submit in executor.submits] == [3, -3]
    assert [submit.echo for submit in executor.submits] == [True, False]
    assert first.prompt == make_prompt(executor.submits[0])
    assert not any(part.HasField("prompt") for part in others)
    for part in (first, answer[0]):
        token = part.tokens[0]
        sent = executor_pb2.Token(id=token.id, text=token.text)
        assert token.logprobs == make_logprobs(sent, 4)


def is_first(submit: executor_pb2.Submit) -> bool:
    """Say whether it is the first answer to the request with the name "r"."""
    return name_of_request(submit.request_id) == "r"


async def test_several_answers_are_choices_of_one_response(client, executor) -> None:
    executor.script_for = lambda submit: Script(texts=[name_of_request(submit.request_id), "!"])

    response = await client.http.post(
        "/v1/completions",
        json=completion_body(prompt=["a", [1, 2]], n=2, seed=7),
        headers={"x-request-id": "r"},
    )

    body = response.json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == ["r!", "r.1!", "r.2!", "r.3!"]
    assert body["id"] == "cmpl-r"
    # Each prompt counts once, each answer's tokens count.
    assert body["usage"] == {
        "prompt_tokens": 2 * NUM_PROMPT_TOKENS,
        "completion_tokens": 8,
        "total_tokens": 2 * NUM_PROMPT_TOKENS + 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    submits = {name_of_request(submit.request_id): submit for submit in executor.submits}
    assert [submits[id].text for id in ("r", "r.1")] == ["a", "a"]
    assert [list(submits[id].token_ids.ids) for id in ("r.2", "r.3")] == [[1, 2], [1, 2]]
    seeds = [submits[id].sampling.seed for id in ("r", "r.1", "r.2", "r.3")]
    assert seeds == [7, 8, 7, 8]


async def test_several_answers_share_one_stream_each_at_its_own_pace(client, executor) -> None:
    slow = Script(texts=["s1", "s2"])
    slow.ending.clear()
    executor.script_for = lambda submit: slow if is_first(submit) else Script(texts=["f"])

    async with client.http.stream(
        "POST",
        "/v1/chat/completions",
        json=stream_body(n=2, stream_options={"include_usage": True}),
        headers={"x-request-id": "r"},
    ) as response:
        lines = response.aiter_lines()
        first: list[dict[str, Any]] = []
        while not any(c["choices"][0]["finish_reason"] for c in first if c["choices"]):
            if line := await anext(lines):
                first.append(json.loads(line.removeprefix("data: ")))
        slow.ending.set()
        rest = [line.removeprefix("data: ") async for line in lines if line]

    # The second answer has ended while the first one is still open.
    assert first[-1]["choices"][0] == {
        "index": 1,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert rest.pop() == "[DONE]"
    chunks = first + [json.loads(line) for line in rest]
    assert chunks[-1]["usage"] == {
        "prompt_tokens": NUM_PROMPT_TOKENS,
        "completion_tokens": 3,
        "total_tokens": NUM_PROMPT_TOKENS + 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    for index, text in enumerate(["s1s2", "f"]):
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == text
        assert [choice["finish_reason"] for choice in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == "stop"


async def test_one_refused_answer_refuses_the_request_and_leaves_nothing(client, executor) -> None:
    refusal = executor_pb2.Rejected(
        code=executor_pb2.REJECT_CODE_CONTEXT_LENGTH, field="prompt", message="too long"
    )
    open_ended = Script()
    open_ended.ending.clear()
    executor.script_for = lambda submit: (
        Script(reject=refusal) if submit.text == "b" else open_ended
    )

    response = await client.http.post(
        "/v1/completions",
        json=completion_body(prompt=["a", "b"]),
        headers={"x-request-id": "r"},
    )

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    await executor.until(lambda: executor.aborted == ["r"])
    await client.wait_idle()


async def test_one_failed_answer_ends_the_stream_and_the_others(client, executor) -> None:
    failing = Script(failure=executor_pb2.Failure(retryable=True, message="lost a rank"))
    open_ended = Script()
    open_ended.ending.clear()
    executor.script_for = lambda submit: failing if is_first(submit) else open_ended

    response = await client.http.post(
        "/v1/chat/completions", json=stream_body(n=2), headers={"x-request-id": "r"}
    )

    last = response.text.strip().split("\n\n")[-1]
    message = json.loads(last.removeprefix("data: "))["error"]["message"]
    assert message.startswith("lost a rank; it could not go on elsewhere")
    await executor.until(lambda: executor.aborted == ["r.1"])
    await client.wait_idle()


async def test_all_answers_are_cancelled_by_the_name_of_their_request(client, executor) -> None:
    executor.script.ending.clear()
    stub = pb_grpc.GatewayServiceStub(client.channel)
    answer = asyncio.create_task(
        client.http.post("/v1/chat/completions", json=chat_body(n=3), headers={"x-request-id": "r"})
    )
    await executor.until(lambda: len(executor.submits) == 3)

    await stub.Cancel(pb.CancelRequest(request_id="r"))

    assert (await answer).status_code == 409
    await executor.until(lambda: sorted(executor.aborted) == ["r", "r.1", "r.2"])
    await client.wait_idle()


async def test_a_client_that_leaves_aborts_all_its_answers(client, executor) -> None:
    executor.script.ending.clear()
    async with client.http.stream(
        "POST", "/v1/chat/completions", json=stream_body(n=2), headers={"x-request-id": "r"}
    ):
        await executor.until(lambda: len(executor.submits) == 2)

    await executor.until(lambda: sorted(executor.aborted) == ["r", "r.1"])
    await client.wait_idle()


async def test_answers_are_taken_all_or_none(executor) -> None:
    executor.script.ending.clear()
    async with gateway_for(executor, max_live_requests=3) as client:
        await client.wait_ready()
        async with client.http.stream("POST", "/v1/chat/completions", json=stream_body()):
            refused = await client.http.post("/v1/chat/completions", json=chat_body(n=3))
            num_submits = len(executor.submits)
            never = await client.http.post("/v1/chat/completions", json=chat_body(n=4))

    assert (refused.status_code, num_submits) == (429, 1)
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["x-ratelimit-limit-requests"] == "3"
    assert refused.headers["x-ratelimit-remaining-requests"] == "2"
    assert refused.headers["x-ratelimit-reset-requests"] == "1s"
    assert (never.status_code, never.json()["error"]["param"]) == (400, "n")


LIKELY = {"token": "<1>", "logprob": -0.5, "bytes": [60, 49, 62]}
E_ACUTE = {"token": "é", "logprob": -1.0, "bytes": [195, 169]}


async def test_a_chat_tells_how_likely_its_tokens_were(client, executor) -> None:
    executor.script = Script(texts=["é", ""])  # a token without text has probabilities too
    body = chat_body(logprobs=True, top_logprobs=2)

    response = await client.http.post("/v1/chat/completions", json=body)
    stream = await client.http.post("/v1/chat/completions", json=body | {"stream": True})

    silent = {"token": "", "logprob": -1.0, "bytes": []}
    expected = [
        E_ACUTE | {"top_logprobs": [LIKELY, E_ACUTE]},
        silent | {"top_logprobs": [LIKELY, silent]},
    ]
    (choice,) = response.json()["choices"]
    assert choice["logprobs"] == {"content": expected, "refusal": None}
    choices = [chunk["choices"][0] for chunk in chunks_of(stream)][1:-1]
    assert [choice["logprobs"]["content"] for choice in choices] == [[one] for one in expected]
    assert [choice["delta"]["content"] for choice in choices] == ["é", ""]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_each_of_several_answers_tells_how_likely_its_tokens_were(
    client, executor, path
) -> None:
    executor.script_for = lambda submit: Script(texts=["a" if is_first(submit) else "b"])
    is_chat = "chat" in path
    asked = chat_body(logprobs=True, top_logprobs=2) if is_chat else completion_body(logprobs=2)

    response = await client.http.post(path, json=asked | {"n": 2}, headers={"x-request-id": "r"})

    for choice, text in zip(response.json()["choices"], "ab", strict=True):
        told = choice["logprobs"]
        tokens = [one["token"] for one in told["content"]] if is_chat else told["tokens"]
        (places,) = told["content"] if is_chat else told["top_logprobs"]
        assert tokens == [text]
        assert len(places["top_logprobs"] if is_chat else places) == 2


async def test_a_chat_may_ask_for_the_chosen_tokens_alone(client, executor) -> None:
    response = await client.http.post("/v1/chat/completions", json=chat_body(logprobs=True))

    content = response.json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[], [], []]
    assert [entry["token"] for entry in content] == ["Hello", ",", " world"]


async def test_a_completion_tells_how_likely_its_tokens_were(client, executor) -> None:
    executor.script = Script(texts=["ab", "c"])
    body = completion_body(logprobs=1)

    response = await client.http.post("/v1/completions", json=body)
    stream = await client.http.post("/v1/completions", json=body | {"stream": True})

    expected = {
        "text_offset": [0, 2],
        "token_logprobs": [-1.0, -1.0],
        "tokens": ["ab", "c"],
        # One likeliest token was asked for; the chosen one is told besides.
        "top_logprobs": [{"<1>": -0.5, "ab": -1.0}, {"<1>": -0.5, "c": -1.0}],
    }
    assert response.json()["choices"][0]["logprobs"] == expected
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks_of(stream)][:-1]
    assert streamed == [{name: [values[k]] for name, values in expected.items()} for k in range(2)]


async def test_a_completion_gives_its_prompt_back(client, executor) -> None:
    executor.script = Script(texts=["ab", "c"])
    body = completion_body(prompt=["Hi", [1, 2]], echo=True)

    response = await client.http.post("/v1/completions", json=body)
    stream = await client.http.post("/v1/completions", json=body | {"stream": True})

    assert [choice["text"] for choice in response.json()["choices"]] == ["Hiabc", "[1, 2]abc"]
    for index, texts in enumerate([["Hi", "ab", "c", ""], ["[1, 2]", "ab", "c", ""]]):
        choices = [chunk["choices"][0] for chunk in chunks_of(stream)]
        assert [c["text"] for c in choices if c["index"] == index] == texts


async def test_a_prompt_comes_back_with_its_probabilities(client, executor) -> None:
    executor.script = Script(texts=["ab"])
    body = completion_body(prompt="Hello", echo=True, logprobs=0)

    response = await client.http.post("/v1/completions", json=body)
    stream = await client.http.post("/v1/completions", json=body | {"stream": True})

    expected = {
        "text_offset": [0, 1, 5],
        "token_logprobs": [None, -1.0, -1.0],
        "tokens": ["H", "ello", "ab"],
        "top_logprobs": [None, {"ello": -1.0}, {"ab": -1.0}],
    }
    assert response.json()["choices"][0]["logprobs"] == expected
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks_of(stream)][:-1]
    for name, values in expected.items():
        assert [value for part in parts for value in part[name]] == values


TOOL = {"type": "function", "function": {"name": "f"}}


async def test_text_and_conversations_become_tokens(client, executor) -> None:
    text = await client.http.post(
        "/tokenize",
        json={"model": MODEL, "prompt": "ab", "add_special_tokens": False},
    )
    chat = await client.http.post(
        "/tokenize",
        json=chat_body(add_generation_prompt=False, return_token_strs=True)
        | {"messages": [{"role": "user", "content": "xy"}], "tools": [TOOL]},
    )
    back = await client.http.post("/detokenize", json={"model": MODEL, "tokens": [97, 98]})

    assert text.json() == {
        "count": 2,
        "max_model_len": 4096,
        "tokens": [97, 98],
        "token_strs": None,
    }
    assert chat.json()["token_strs"] == ["x", "y"]
    assert back.json() == {"prompt": "ab"}
    assert executor.tokenized == [
        executor_pb2.TokenizeRequest(
            model=MODEL, text="ab", omits_special_tokens=True, fair_key="127.0.0.1"
        ),
        executor_pb2.TokenizeRequest(
            model=MODEL,
            chat=executor_pb2.Chat(
                messages=[gen.ChatMessage(role="user", content="xy")],
                options=gen.ConversationOptions(
                    tools=[gen.Tool(name="f")], tool_choice=gen.TOOL_CHOICE_AUTO
                ),
            ),
            omits_generation_prompt=True,
            with_texts=True,
            fair_key="127.0.0.1",
        ),
    ]


WITHOUT_TOKENS: list[tuple[str, dict[str, object], int, str]] = [
    ("/tokenize", {"prompt": "a"}, 400, "model"),
    ("/tokenize", {"model": MODEL}, 400, "prompt"),
    ("/tokenize", chat_body(prompt="a"), 400, "prompt"),
    ("/tokenize", chat_body(messages=[]), 400, "messages"),
    ("/tokenize", {"model": MODEL, "prompt": 5}, 400, "prompt"),
    ("/tokenize", chat_body(tools=[]), 400, "tools"),
    ("/tokenize", chat_body(tools=[TOOL, TOOL]), 400, "tools"),
    ("/tokenize", {"model": MODEL, "prompt": "a", "tools": [TOOL]}, 400, "tools"),
    ("/tokenize", {"model": "other", "prompt": "a"}, 404, "model"),
    ("/tokenize", {"model": MODEL, "prompt": UNRENDERABLE}, 400, "prompt"),
    (
        "/tokenize",
        chat_body(messages=[{"role": "user", "content": UNRENDERABLE}]),
        400,
        "messages",
    ),
    ("/detokenize", {"model": MODEL}, 400, "tokens"),
    ("/detokenize", {"model": MODEL, "tokens": [-1]}, 400, "tokens[0]"),
    ("/detokenize", {"model": MODEL, "tokens": [2**31]}, 400, "tokens[0]"),
    ("/detokenize", {"model": MODEL, "tokens": ["a"]}, 400, "tokens[0]"),
    ("/detokenize", {"model": "other", "tokens": [1]}, 404, "model"),
]


async def test_what_has_no_tokens_is_refused(client) -> None:
    for path, body, status, param in WITHOUT_TOKENS:
        response = await client.http.post(path, json=body)

        answer = (response.status_code, response.json()["error"]["param"])
        assert answer == (status, param), (path, body)


async def test_a_full_executor_leads_to_the_next_and_all_full_ones_to_a_429() -> None:
    full = Script(
        reject=executor_pb2.Rejected(code=executor_pb2.REJECT_CODE_OVERLOADED, message="full")
    )
    executors = [FakeExecutor(executor_id=f"executor-{k}") for k in range(2)]
    for executor in executors:
        await executor.start()
    executors[0].script = full
    async with gateway_for(*executors) as client:
        await client.wait_ready()
        await until(lambda: all(executor.gateway_ids for executor in executors))
        taken = await client.http.post("/v1/chat/completions", json=chat_body())
        executors[1].script = full
        refused = await client.http.post("/v1/chat/completions", json=chat_body())
    for executor in executors:
        await executor.kill()

    assert taken.status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    assert refused.headers["retry-after"] == "1"
    assert len(executors[1].submits) == 2


async def test_an_echo_of_a_stream_comes_first_over_grpc(client, executor) -> None:
    stub = pb_grpc.GatewayServiceStub(client.channel)
    call = stub.Generate(pb.GenerateRequest(model=MODEL, text="Hi", echo=True))

    first = await call.read()

    assert first is not aio.EOF
    assert first.prompt == gen.EchoedPrompt(text="Hi")
