"""Tools and reasoning, from the clients of both edges to the executor and back."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest

from evenflow.executor.v1 import executor_pb2
from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from tests.fake_executor import MODEL, FakeExecutor, Script
from tests.gateways import Client

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
MESSAGES: list[Any] = [{"role": "user", "content": "Rain in Oslo?"}]


def part(index: int, id: str = "", name: str = "", arguments: str = "") -> gen.ToolCallPart:
    return gen.ToolCallPart(index=index, id=id, name=name, arguments=arguments)


SAID: list[str | executor_pb2.Token] = [
    executor_pb2.Token(reasoning="They ask "),
    executor_pb2.Token(reasoning="for rain."),
    "",
    "One moment.",
    executor_pb2.Token(tool_calls=[part(0, "c0", "weather")]),
    executor_pb2.Token(tool_calls=[part(0, arguments='{"city": ')]),
    executor_pb2.Token(tool_calls=[part(0, arguments='"Oslo"}')]),
    executor_pb2.Token(tool_calls=[part(1, "c1", "weather", "{}")]),
]


@pytest.fixture
def calling(executor: FakeExecutor) -> FakeExecutor:
    executor.script = Script(
        texts=SAID, finish_reason=gen.FINISH_REASON_TOOL_CALLS, num_reasoning_tokens=2
    )
    return executor


@pytest.fixture
async def sdk(client: Client) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{client.base_url}/v1", api_key="unused", max_retries=0
    ) as sdk:
        yield sdk


def check(choice: Any) -> None:
    message = choice.message
    assert (message.content, message.reasoning_content) == ("One moment.", "They ask for rain.")
    assert [(c.id, c.type, c.function.name) for c in message.tool_calls] == [
        ("c0", "function", "weather"),
        ("c1", "function", "weather"),
    ]
    assert [json.loads(c.function.arguments) for c in message.tool_calls] == [{"city": "Oslo"}, {}]
    assert choice.finish_reason == "tool_calls"


async def test_the_sdk_gets_calls_and_thoughts_of_a_whole_answer(calling, sdk) -> None:
    answer = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[TOOL], n=2)

    for choice in answer.choices:
        check(choice)
    assert answer.usage.completion_tokens == 2 * len(SAID)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2 * 2


async def test_the_sdk_puts_streamed_calls_together(calling, sdk) -> None:
    async with sdk.chat.completions.stream(
        model=MODEL, messages=MESSAGES, tools=[TOOL], stream_options={"include_usage": True}
    ) as stream:
        answer = await stream.get_final_completion()

    check(answer.choices[0])
    assert answer.usage.completion_tokens == len(SAID)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2


async def test_a_stream_has_an_event_for_each_token_that_says_something(calling, sdk) -> None:
    stream = await sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[TOOL], stream=True
    )
    deltas = [chunk.choices[0].delta async for chunk in stream]

    assert len(deltas) == 1 + (len(SAID) - 1) + 1  # the role, what is said, the ending
    assert [d.reasoning_content for d in deltas[1:3]] == ["They ask ", "for rain."]
    assert [d.tool_calls[0].index for d in deltas[4:-1]] == [0, 0, 0, 1]


async def test_all_that_a_conversation_may_say_reaches_the_executor(calling, sdk) -> None:
    first = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[TOOL])
    said = first.choices[0].message.model_dump()
    await sdk.chat.completions.create(
        model=MODEL,
        messages=[*MESSAGES, said, {"role": "tool", "tool_call_id": "c0", "content": "dry"}],
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        reasoning_effort="low",
        extra_body={
            "include_reasoning": False,
            "chat_template_kwargs": {"enable_thinking": True},
        },
    )

    plain, full = (submit.chat for submit in calling.submits)
    assert plain.options == gen.ConversationOptions(
        tools=[gen.Tool(name="weather", parameters=json.dumps(SCHEMA))],
        tool_choice=gen.TOOL_CHOICE_AUTO,
    )
    assert full.options == gen.ConversationOptions(
        tools=plain.options.tools,
        tool_choice=gen.TOOL_CHOICE_NAMED,
        named_tool="weather",
        forbids_parallel_calls=True,
        omits_reasoning=True,
        reasoning_effort="low",
        template_variables='{"enable_thinking": true}',
    )
    _, answer, result = full.messages
    assert (answer.content, answer.reasoning) == ("One moment.", "They ask for rain.")
    assert [call.id for call in answer.tool_calls] == ["c0", "c1"]
    assert result == gen.ChatMessage(role="tool", tool_call_id="c0", content="dry")


async def test_a_plain_conversation_says_nothing_of_tools(client, executor) -> None:
    body = {"model": MODEL, "messages": MESSAGES}
    response = await client.http.post("/v1/chat/completions", json=body)

    assert response.status_code == 200
    assert set(response.json()["choices"][0]["message"]) == {"role", "content", "refusal"}
    assert "completion_tokens_details" not in response.json()["usage"]
    assert not executor.submits[0].chat.HasField("options")


async def test_grpc_clients_get_calls_and_thoughts_token_by_token(client, calling) -> None:
    stub = pb_grpc.GatewayServiceStub(client.channel)
    options = gen.ConversationOptions(tools=[gen.Tool(name="f")], tool_choice=gen.TOOL_CHOICE_AUTO)
    request = pb.ChatRequest(
        model=MODEL,
        messages=[gen.ChatMessage(role="user", content="Hi")],
        options=options,
    )
    responses = [response async for response in stub.Chat(request)]
    tokens = [token for response in responses for token in response.tokens]

    assert calling.submits[0].chat.options == options
    assert [token.reasoning for token in tokens[:2]] == ["They ask ", "for rain."]
    assert [list(token.tool_calls) for token in tokens[4:]] == [
        list(said.tool_calls) for said in SAID[4:] if isinstance(said, executor_pb2.Token)
    ]
    assert responses[-1].finish.reason == gen.FINISH_REASON_TOOL_CALLS
    assert responses[-1].finish.usage.num_reasoning_tokens == 2


def chat_tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def response_tool(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name}


def message_tool(name: str) -> dict[str, Any]:
    return {"name": name, "input_schema": {}}


@pytest.mark.parametrize(
    ("path", "tool", "asked", "name_field"),
    [
        ("/v1/chat/completions", chat_tool, {"messages": MESSAGES}, "tools[0].function.name"),
        ("/tokenize", chat_tool, {"messages": MESSAGES}, "tools[0].function.name"),
        ("/v1/responses", response_tool, {"input": "Hi"}, "tools[0].name"),
        ("/v1/messages", message_tool, {"messages": MESSAGES, "max_tokens": 9}, "tools[0].name"),
        ("/v1/messages/count_tokens", message_tool, {"messages": MESSAGES}, "tools[0].name"),
    ],
)
async def test_all_apis_take_as_many_tools_with_names_as_long(
    client: Client,
    executor: FakeExecutor,
    path: str,
    tool: Callable[[str], dict[str, Any]],
    asked: dict[str, Any],
    name_field: str,
) -> None:
    async def ask(*tools: dict[str, Any]) -> httpx.Response:
        return await client.http.post(path, json={"model": MODEL, **asked, "tools": tools})

    tools = [tool(f"{k:0>128}") for k in range(4_096)]
    most = await ask(*tools)
    too_many = await ask(*tools, tool("f"))
    too_long = await ask(tool("f" * 129))

    assert (most.status_code, too_many.status_code, too_long.status_code) == (200, 400, 400)
    (taken,) = [*executor.submits, *executor.tokenized]
    assert [len(one.name) for one in taken.chat.options.tools] == [128] * 4_096
    told = too_many.json()["error"]["message"]
    assert told == "tools: must have at most 4096 items, not 4097"
    assert too_long.json()["error"]["message"].startswith(f"{name_field}: must match")
