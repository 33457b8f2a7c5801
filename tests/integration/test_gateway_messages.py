"""The Messages API: the stock `anthropic` package, and what Claude Code sends."""

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import generation_pb2 as gen
from tests.fake_executor import MODEL, NUM_PROMPT_TOKENS, Script
from tests.gateways import Client
from tests.integration.calling import Weather

MESSAGES: Any = [{"role": "user", "content": "Rain in Oslo?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"name": "weather", "description": "Weather in a city.", "input_schema": SCHEMA}


@pytest.fixture
async def sdk(client: Client) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=client.base_url, api_key="unused", max_retries=0
    ) as sdk:
        yield sdk


async def test_the_sdk_gets_a_whole_message(sdk, executor) -> None:
    message = await sdk.messages.create(
        model=MODEL,
        max_tokens=5,
        system="Be brief.",
        messages=MESSAGES,
        stop_sequences=["END"],
        extra_body={"evenflow": {"slo_tpot_ms": 125}},
        extra_headers={"x-request-id": "r1", "x-slo-ttft-ms": "250"},
    )

    assert [(block.type, block.text) for block in message.content] == [("text", "Hello, world")]
    assert (message.id, message._request_id, message.stop_reason) == ("msg_r1", "r1", "end_turn")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (NUM_PROMPT_TOKENS, 3)
    (submit,) = executor.submits
    assert [(m.role, m.content) for m in submit.chat.messages] == [
        ("system", "Be brief."),
        ("user", "Rain in Oslo?"),
    ]
    assert (submit.sampling.max_tokens, list(submit.sampling.stop)) == (5, ["END"])
    level = submit.service_level
    assert (level.slo_tpot_s, level.slo_ttft_s) == (0.125, 0.25)


async def test_the_sdk_streams_a_message(sdk) -> None:
    async with sdk.messages.stream(model=MODEL, max_tokens=5, messages=MESSAGES) as stream:
        texts = [text async for text in stream.text_stream]
        message = await stream.get_final_message()

    assert texts == ["Hello", ",", " world"]
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 3)


def check(message: anthropic.types.Message) -> None:
    thought, said, call = message.content
    assert (thought.type, said.type, call.type) == ("thinking", "text", "tool_use")
    assert (thought.thinking, said.text) == ("They ask for rain.", "One moment.")
    assert (call.id, call.name, call.input) == ("c0", "weather", {"city": "Oslo"})
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens_details.thinking_tokens == 2


async def test_the_sdk_gets_calls_and_thoughts(calling, sdk) -> None:
    whole = await sdk.messages.create(model=MODEL, max_tokens=9, messages=MESSAGES, tools=[TOOL])
    async with sdk.messages.stream(
        model=MODEL, max_tokens=9, messages=MESSAGES, tools=[TOOL]
    ) as stream:
        streamed = await stream.get_final_message()

    check(whole)
    check(streamed)


async def test_a_message_goes_on_as_a_turn(calling, sdk) -> None:
    first = await sdk.messages.create(model=MODEL, max_tokens=9, messages=MESSAGES, tools=[TOOL])
    result: Any = {"type": "tool_result", "tool_use_id": "c0", "content": "dry"}
    await sdk.messages.create(
        model=MODEL,
        max_tokens=9,
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ],
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "weather"},
    )

    chat = calling.submits[1].chat
    _, said, answered = chat.messages
    assert (said.content, said.reasoning) == ("One moment.", "They ask for rain.")
    assert [(c.id, c.name, c.arguments) for c in said.tool_calls] == [
        ("c0", "weather", '{"city": "Oslo"}')
    ]
    assert answered == gen.ChatMessage(role="tool", tool_call_id="c0", content="dry")
    assert (chat.options.tool_choice, chat.options.named_tool) == (
        gen.TOOL_CHOICE_NAMED,
        "weather",
    )


async def test_parse_asks_for_a_schema_and_reads_the_answer(sdk, executor) -> None:
    executor.script = Script(texts=['{"city": "Oslo", ', '"is_wet": false}'])

    asked = {"model": MODEL, "max_tokens": 9, "messages": MESSAGES, "output_format": Weather}
    message = await sdk.messages.parse(**asked)
    async with sdk.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()

    assert message.parsed_output == streamed.parsed_output == Weather(city="Oslo", is_wet=False)
    for submit in executor.submits:
        assert "is_wet" in submit.sampling.structured_outputs.json_schema


async def test_tokens_are_counted_without_the_engine(sdk, executor) -> None:
    counted = await sdk.messages.count_tokens(
        model=MODEL, messages=MESSAGES, system="Be brief.", tools=[TOOL]
    )

    assert counted.input_tokens == len("Be brief.Rain in Oslo?")  # the fake's: a character each
    assert [tool.name for tool in executor.tokenized[0].chat.options.tools] == ["weather"]
    assert not executor.submits


async def test_an_answer_that_came_to_a_stop_sequence_says_so(sdk, executor) -> None:
    executor.script = Script(stop_string="END")
    asked: Any = {"model": MODEL, "max_tokens": 5, "messages": MESSAGES, "stop_sequences": ["END"]}
    whole = await sdk.messages.create(**asked)
    async with sdk.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()

    for message in (whole, streamed):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


async def test_closing_a_stream_aborts_the_request(client, sdk, executor) -> None:
    executor.script.ending.clear()
    async with sdk.messages.stream(
        model=MODEL, max_tokens=5, messages=MESSAGES, extra_headers={"x-request-id": "left"}
    ) as stream:
        async for _ in stream.text_stream:
            break

    await executor.until(lambda: executor.aborted == ["left"])
    await client.wait_idle()


async def test_errors_are_the_sdk_s_classes(sdk) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 5, "messages": MESSAGES}
    with pytest.raises(anthropic.BadRequestError) as bad:
        await sdk.messages.create(**asked | {"max_tokens": 0})
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await sdk.messages.create(**asked | {"model": "other"})

    assert bad.value.body["error"]["type"] == "invalid_request_error"
    assert bad.value.request_id == bad.value.body["request_id"]
    assert unknown.value.body["error"]["type"] == "not_found_error"


async def test_an_error_inside_a_stream_is_raised(sdk, executor) -> None:
    executor.script.ending.clear()
    texts: list[str] = []

    async def read_all() -> None:
        async with sdk.messages.stream(model=MODEL, max_tokens=5, messages=MESSAGES) as stream:
            async for text in stream.text_stream:
                texts.append(text)
                if len(texts) == 3:
                    await executor.kill()

    with pytest.raises(anthropic.APIStatusError, match="connection to the executor was lost"):
        await read_all()
    assert "".join(texts) == "Hello, world"


# As Claude Code sends it to a server that is named by ANTHROPIC_BASE_URL.
OF_CLAUDE_CODE: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 4000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cch=0a1b2;"},
        {
            "type": "text",
            "text": "You are Claude Code.",
            "cache_control": {"type": "ephemeral"},
        },
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nBe careful.\n</system-reminder>\n"},
                {"type": "text", "text": "List the files."},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "ls.", "signature": "unsigned"},
                {"type": "tool_use", "id": "c0", "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c0",
                    "content": "a.py",
                    "is_error": False,
                    "cache_control": {"type": "ephemeral"},
                }
            ],
        },
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Runs a command.",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
                "additionalProperties": False,
            },
        }
    ],
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "temperature": 1,
    "stream": True,
}


async def test_bodies_of_claude_code_are_taken(client, executor) -> None:
    response = await client.http.post("/v1/messages?beta=true", json=OF_CLAUDE_CODE)

    assert response.status_code == 200, response.text
    assert response.headers["x-evenflow-ignored"] == "context_management, metadata"
    assert [m.role for m in executor.submits[0].chat.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]
    assert executor.submits[0].chat.messages[0].content == "You are Claude Code."


@pytest.mark.parametrize(
    ("num_tokens", "told"),
    [
        (20_204, "prompt is too long: 20204 tokens > 8192 maximum"),
        (0, "prompt is too long: more than 8192 tokens > 8192 maximum"),  # not counted
    ],
)
async def test_a_prompt_that_is_too_long_is_told_in_the_api_s_own_words(
    client, executor, num_tokens: int, told: str
) -> None:
    overflow = pb.PromptOverflow(num_prompt_tokens=num_tokens, max_model_len=8_192)
    executor.script = Script(
        reject=pb.Rejected(
            code=pb.REJECT_CODE_CONTEXT_LENGTH,
            field="messages",
            message="This model's maximum context length is 8192 tokens.",
            overflow=overflow,
        )
    )
    body = {"model": MODEL, "max_tokens": 9, "messages": MESSAGES}

    refused = await client.http.post("/v1/messages", json=body)
    chat = await client.http.post("/v1/chat/completions", json=body)

    assert refused.status_code == 400
    assert refused.json()["error"] == {"type": "invalid_request_error", "message": told}
    assert chat.json()["error"]["code"] == "context_length_exceeded"
    assert chat.json()["error"]["message"].startswith("This model's maximum context length")


async def test_a_conversation_of_many_contexts_is_counted(client) -> None:
    long: Any = [{"role": "user", "content": "word " * 100_000}]

    response = await client.http.post(
        "/v1/messages/count_tokens", json={"model": MODEL, "messages": long}
    )

    assert response.status_code == 200, response.text
    assert response.json()["input_tokens"] > 0
