"""The Responses API: the stock `openai` package, and what the Agents SDK sends by default."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from evenflow.gateway.v1 import generation_pb2 as gen
from tests.fake_executor import MODEL, NUM_PROMPT_TOKENS, Script
from tests.gateways import Client
from tests.integration.calling import Weather

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}


@pytest.fixture
async def sdk(client: Client) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{client.base_url}/v1", api_key="unused", max_retries=0
    ) as sdk:
        yield sdk


async def test_the_sdk_gets_a_whole_response(sdk, executor) -> None:
    response = await sdk.responses.create(
        model=MODEL,
        input="Say hello.",
        instructions="Be brief.",
        max_output_tokens=5,
        extra_body={"evenflow": {"slo_tpot_ms": 125}},
        extra_headers={"x-request-id": "r1", "x-slo-ttft-ms": "250"},
    )

    assert response.output_text == "Hello, world"
    assert (response.id, response.status, response.store) == ("resp_r1", "completed", False)
    assert (response.usage.input_tokens, response.usage.output_tokens) == (NUM_PROMPT_TOKENS, 3)
    (submit,) = executor.submits
    assert [(m.role, m.content) for m in submit.chat.messages] == [
        ("system", "Be brief."),
        ("user", "Say hello."),
    ]
    assert submit.sampling.max_tokens == 5
    level = submit.service_level
    assert (level.slo_tpot_s, level.slo_ttft_s) == (0.125, 0.25)


async def test_the_sdk_streams_a_response(sdk) -> None:
    stream = await sdk.responses.create(model=MODEL, input="Say hello.", stream=True)
    events = [event async for event in stream]

    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert deltas == ["Hello", ",", " world"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert events[-1].response.output_text == "Hello, world"


async def test_the_helper_that_accumulates_a_stream_gets_calls_and_thoughts(calling, sdk) -> None:
    async with sdk.responses.stream(model=MODEL, input="Rain in Oslo?", tools=[TOOL]) as stream:
        response = await stream.get_final_response()

    thought, said, call = response.output
    assert thought.content[0].text == "They ask for rain."
    assert said.content[0].text == response.output_text == "One moment."
    assert (call.call_id, call.name, json.loads(call.arguments)) == (
        "c0",
        "weather",
        {"city": "Oslo"},
    )
    assert response.usage.output_tokens_details.reasoning_tokens == 2


async def test_what_a_response_put_out_goes_on_as_input(calling, sdk) -> None:
    question: Any = {"role": "user", "content": "Rain in Oslo?"}
    first = await sdk.responses.create(model=MODEL, input=[question], tools=[TOOL])
    answered: Any = {"type": "function_call_output", "call_id": "c0", "output": "dry"}
    put_out: Any = [item.model_dump() for item in first.output]
    await sdk.responses.create(model=MODEL, input=[question, *put_out, answered], tools=[TOOL])

    _, said, result = calling.submits[1].chat.messages
    assert (said.role, said.content, said.reasoning) == (
        "assistant",
        "One moment.",
        "They ask for rain.",
    )
    assert [(c.id, c.name, json.loads(c.arguments)) for c in said.tool_calls] == [
        ("c0", "weather", {"city": "Oslo"})
    ]
    assert result == gen.ChatMessage(role="tool", tool_call_id="c0", content="dry")


async def test_parse_asks_for_a_schema_and_reads_the_answer(sdk, executor) -> None:
    executor.script = Script(texts=['{"city": "Oslo", ', '"is_wet": false}'])

    parsed = await sdk.responses.parse(model=MODEL, input="Rain?", text_format=Weather)
    async with sdk.responses.stream(model=MODEL, input="Rain?", text_format=Weather) as stream:
        streamed = await stream.get_final_response()

    assert parsed.output_parsed == streamed.output_parsed == Weather(city="Oslo", is_wet=False)
    asked = json.loads(executor.submits[0].sampling.structured_outputs.json_schema)
    assert set(asked["properties"]) == {"city", "is_wet"}


async def test_closing_a_stream_aborts_the_request(client, sdk, executor) -> None:
    executor.script.ending.clear()
    stream = await sdk.responses.create(
        model=MODEL, input="Hi", stream=True, extra_headers={"x-request-id": "left"}
    )
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()

    await executor.until(lambda: executor.aborted == ["left"])
    await client.wait_idle()


async def test_an_error_inside_a_stream_is_raised(sdk, executor) -> None:
    executor.script.ending.clear()
    stream = await sdk.responses.create(model=MODEL, input="Hi", stream=True)
    texts: list[str] = []

    async def read_all() -> None:
        async for event in stream:
            if event.type == "response.output_text.delta":
                texts.append(event.delta)
                if len(texts) == 3:
                    await executor.kill()

    with pytest.raises(openai.APIError, match="connection to the executor was lost"):
        await read_all()
    assert "".join(texts) == "Hello, world"


async def test_what_needs_memory_is_refused_by_name(sdk) -> None:
    with pytest.raises(openai.BadRequestError) as kept:
        await sdk.responses.create(model=MODEL, input="Hi", store=True)
    with pytest.raises(openai.BadRequestError) as earlier:
        await sdk.responses.create(model=MODEL, input="Hi", previous_response_id="resp_1")

    assert (kept.value.param, earlier.value.param) == ("store", "previous_response_id")


# As openai-agents sends it (OpenAIResponsesModel), with a function tool, a hosted tool, and the
# items of an earlier turn as its session kept them.
OF_AGENTS: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You are a helpful agent.",
    "input": [
        {"content": "Rain in Oslo?", "role": "user"},
        {
            "id": "rs_r0_0",
            "summary": [],
            "type": "reasoning",
            "content": [{"text": "Look it up.", "type": "reasoning_text"}],
            "status": "completed",
        },
        {
            "arguments": '{"city":"Oslo"}',
            "call_id": "c0",
            "name": "weather",
            "type": "function_call",
            "id": "fc_r0_1",
            "status": "completed",
        },
        {"call_id": "c0", "output": "dry", "type": "function_call_output"},
        {
            "id": "msg_r1_0",
            "content": [
                {"annotations": [], "text": "It is dry.", "type": "output_text", "logprobs": []}
            ],
            "role": "assistant",
            "status": "completed",
            "type": "message",
        },
        {"content": "And in Bergen?", "role": "user"},
    ],
    "include": ["reasoning.encrypted_content"],
    "tools": [
        {
            "name": "weather",
            "parameters": SCHEMA | {"required": ["city"], "additionalProperties": False},
            "strict": True,
            "type": "function",
            "description": "Weather in a city.",
        },
        {"type": "web_search", "search_context_size": "medium"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "temperature": 0.1,
    "truncation": "auto",
    "store": False,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"verbosity": "low"},
    "metadata": {"trace": "t1"},
    "prompt_cache_retention": "24h",
    "service_tier": "auto",
}


@pytest.mark.parametrize("stream", [False, True])
async def test_bodies_of_the_agents_sdk_are_taken(client, executor, stream) -> None:
    response = await client.http.post("/v1/responses", json=OF_AGENTS | {"stream": stream})

    assert response.status_code == 200, response.text
    assert set(response.headers["x-evenflow-ignored"].split(", ")) == {
        "reasoning.summary",
        "service_tier",
        "text.verbosity",
        "tools.web_search",
        "truncation",
    }
    (submit,) = executor.submits
    roles = [message.role for message in submit.chat.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert [tool.name for tool in submit.chat.options.tools] == ["weather"]
    assert submit.chat.options.forbids_parallel_calls
