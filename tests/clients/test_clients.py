"""The packages that people call an OpenAI server with, against the gateway: streamed and not."""

import json
from collections.abc import AsyncIterator
from typing import Any

import litellm
import openai
import pytest
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import generation_pb2 as gen
from tests.fake_executor import MODEL, FakeExecutor, Script
from tests.gateways import Client

HELLO = [{"role": "user", "content": "Say hello."}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": PARAMETERS,
        "strict": True,
    },
}
CALL = Script(
    texts=[
        pb.Token(reasoning="They ask."),
        pb.Token(tool_calls=[gen.ToolCallPart(index=0, id="c0", name="weather")]),
        pb.Token(tool_calls=[gen.ToolCallPart(index=0, arguments='{"city": ')]),
        pb.Token(tool_calls=[gen.ToolCallPart(index=0, arguments='"Oslo"}')]),
    ],
    finish_reason=gen.FINISH_REASON_TOOL_CALLS,
)


class City(BaseModel):
    name: str


@pytest.fixture
def calling(executor: FakeExecutor) -> FakeExecutor:
    """Return an executor whose model calls the tool, and answers when it has its result."""

    def script(submit: pb.Submit) -> Script:
        return Script() if submit.chat.messages[-1].role == "tool" else CALL

    executor.script_for = script
    return executor


@pytest.fixture
async def sdk(client: Client) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{client.base_url}/v1", api_key="unused", max_retries=0
    ) as sdk:
        yield sdk


@pytest.fixture
def chat_model(client: Client) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=f"{client.base_url}/v1", api_key="unused", max_retries=0
    )


def results_told(executor: FakeExecutor) -> list[tuple[str, str]]:
    """Return the ids of calls and their results, as the last request has them."""
    turns = executor.submits[-1].chat.messages
    return [(turn.tool_call_id, turn.content) for turn in turns if turn.role == "tool"]


async def test_openai_chats(sdk) -> None:
    whole = await sdk.chat.completions.create(
        model=MODEL, messages=HELLO, user="u", metadata={"a": "b"}, store=False
    )
    async with sdk.chat.completions.stream(
        model=MODEL, messages=HELLO, stream_options={"include_usage": True}
    ) as stream:
        final = await stream.get_final_completion()

    assert whole.choices[0].message.content == final.choices[0].message.content == "Hello, world"
    assert whole.usage == final.usage


async def test_openai_parses_an_answer_of_a_form(executor, sdk) -> None:
    executor.script = Script(texts=['{"name": ', '"Oslo"}'])

    whole = await sdk.chat.completions.parse(model=MODEL, messages=HELLO, response_format=City)
    async with sdk.chat.completions.stream(
        model=MODEL, messages=HELLO, response_format=City
    ) as stream:
        final = await stream.get_final_completion()

    assert whole.choices[0].message.parsed == final.choices[0].message.parsed == City(name="Oslo")
    for submit in executor.submits:
        schema = json.loads(submit.sampling.structured_outputs.json_schema)
        assert schema["required"] == ["name"]


async def test_openai_calls_a_tool_and_sends_the_turn_back_as_it_is(calling, sdk) -> None:
    whole = await sdk.chat.completions.create(model=MODEL, messages=HELLO, tools=[TOOL])
    async with sdk.chat.completions.stream(model=MODEL, messages=HELLO, tools=[TOOL]) as stream:
        final = await stream.get_final_completion()

    for completion in (whole, final):
        turn = completion.choices[0].message
        assert turn.tool_calls[0].function.arguments == '{"city": "Oslo"}'
        result = {"role": "tool", "tool_call_id": "c0", "content": "Sunny."}
        answer = await sdk.chat.completions.create(
            model=MODEL, messages=[*HELLO, turn.model_dump(), result], tools=[TOOL]
        )
        assert answer.choices[0].message.content == "Hello, world"
        assert results_told(calling) == [("c0", "Sunny.")]
        assert calling.submits[-1].chat.messages[1].reasoning == "They ask."


async def test_openai_asks_for_responses(sdk) -> None:
    whole = await sdk.responses.create(model=MODEL, input="Say hello.")
    async with sdk.responses.stream(model=MODEL, input="Say hello.") as stream:
        final = await stream.get_final_response()

    assert whole.output_text == final.output_text == "Hello, world"
    assert whole.usage == final.usage


async def test_openai_parses_a_response_of_a_form(executor, sdk) -> None:
    executor.script = Script(texts=['{"name": ', '"Oslo"}'])

    whole = await sdk.responses.parse(model=MODEL, input="Where?", text_format=City)
    async with sdk.responses.stream(model=MODEL, input="Where?", text_format=City) as stream:
        final = await stream.get_final_response()

    assert whole.output_parsed == final.output_parsed == City(name="Oslo")


async def litellm_call(client: Client, **parameters: Any) -> Any:
    return await litellm.acompletion(
        model=f"openai/{MODEL}",
        api_base=f"{client.base_url}/v1",
        api_key="unused",
        max_retries=0,
        **parameters,
    )


async def test_litellm_chats(client) -> None:
    whole = await litellm_call(client, messages=HELLO, user="u")
    chunks = [chunk async for chunk in await litellm_call(client, messages=HELLO, stream=True)]

    assert whole.choices[0].message.content == "Hello, world"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, world"


async def test_litellm_gets_an_answer_of_a_form(executor, client) -> None:
    executor.script = Script(texts=['{"name": ', '"Oslo"}'])

    asked = {"messages": HELLO, "response_format": City}
    whole = await litellm_call(client, **asked)
    chunks = [chunk async for chunk in await litellm_call(client, **asked, stream=True)]

    for completion in (whole, litellm.stream_chunk_builder(chunks)):
        answer = completion.choices[0].message.content
        assert City.model_validate_json(answer) == City(name="Oslo")
    for submit in executor.submits:
        schema = json.loads(submit.sampling.structured_outputs.json_schema)
        assert schema["required"] == ["name"]


async def test_litellm_calls_a_tool_and_sends_the_turn_back_as_it_is(client, calling) -> None:
    whole = await litellm_call(client, messages=HELLO, tools=[TOOL])
    chunks = [
        chunk
        async for chunk in await litellm_call(client, messages=HELLO, tools=[TOOL], stream=True)
    ]

    for completion in (whole, litellm.stream_chunk_builder(chunks)):
        turn = completion.choices[0].message
        assert turn.tool_calls[0].function.arguments == '{"city": "Oslo"}'
        assert turn.reasoning_content == "They ask."
        result = {"role": "tool", "tool_call_id": "c0", "name": "weather", "content": "Sunny."}
        answer = await litellm_call(
            client, messages=[*HELLO, turn.model_dump(), result], tools=[TOOL]
        )
        assert answer.choices[0].message.content == "Hello, world"
        assert results_told(calling) == [("c0", "Sunny.")]


async def test_langchain_chats(chat_model) -> None:
    whole = await chat_model.ainvoke([HumanMessage("Say hello.", name="ada")], user="u")
    parts = [part async for part in chat_model.astream("Say hello.", stream_usage=True)]

    assert whole.content == "".join(part.content for part in parts) == "Hello, world"
    assert whole.usage_metadata["input_token_details"]["cache_read"] == 0
    assert sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata) == 3


async def test_langchain_gets_an_answer_of_a_form(executor, chat_model) -> None:
    executor.script = Script(texts=['{"name": ', '"Oslo"}'])

    formed = chat_model.with_structured_output(City, method="json_schema")
    whole = await formed.ainvoke("Where?")
    parts = [part async for part in formed.astream("Where?")]

    assert whole == parts[-1] == City(name="Oslo")


async def test_langchain_calls_a_tool(calling, chat_model) -> None:
    bound = chat_model.bind_tools([TOOL], parallel_tool_calls=False)
    whole = await bound.ainvoke("Weather?")
    streamed = None
    async for part in bound.astream("Weather?"):
        streamed = part if streamed is None else streamed + part

    for turn in (whole, streamed):
        (call,) = turn.tool_calls
        assert (call["id"], call["name"], call["args"]) == ("c0", "weather", {"city": "Oslo"})
        result = ToolMessage("Sunny.", tool_call_id="c0", name="weather")
        answer = await bound.ainvoke([HumanMessage("Weather?"), turn, result])
        assert answer.content == "Hello, world"
        assert results_told(calling) == [("c0", "Sunny.")]


async def test_langchain_asks_for_responses(client) -> None:
    model = ChatOpenAI(
        model=MODEL,
        base_url=f"{client.base_url}/v1",
        api_key="unused",
        max_retries=0,
        use_responses_api=True,
    )
    whole = await model.ainvoke("Say hello.")
    parts = [part async for part in model.astream("Say hello.")]

    assert whole.text == "".join(part.text for part in parts) == "Hello, world"


@pytest.fixture(params=[OpenAIResponsesModel, OpenAIChatCompletionsModel])
def agent(request: pytest.FixtureRequest, sdk: openai.AsyncOpenAI) -> Agent[Any]:
    """Return an agent that asks in its package's default way, or for chat completions."""
    set_tracing_disabled(True)

    @function_tool
    def weather(city: str) -> str:
        """Tell the weather."""
        return f"Sunny in {city}."

    model = request.param(model=MODEL, openai_client=sdk)
    return Agent(name="a", instructions="Be brief.", model=model, tools=[weather])


async def test_an_agent_of_openai_s_calls_a_tool(calling, agent) -> None:
    whole = await Runner.run(agent, "Weather?")
    told = results_told(calling)
    streamed = Runner.run_streamed(agent, "Weather?")
    async for _ in streamed.stream_events():
        pass

    assert whole.final_output == streamed.final_output == "Hello, world"
    assert told == results_told(calling) == [("c0", "Sunny in Oslo.")]
