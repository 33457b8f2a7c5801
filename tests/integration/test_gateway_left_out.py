"""What a model or its chat template cannot take is left out of a conversation, and named."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.fake_executor import MODEL, FakeExecutor
from tests.gateways import JSON, Client, gateway_for

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TURNS = [{"role": "user", "content": "Hi"}]
STRICT = {"evenflow": {"strict": True}}
THINKING_OFF = {"chat_template_kwargs": {"enable_thinking": False}}
LINE = "[image left out: the model takes none]"
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A call, and what becomes of a member of it."""

    path: str
    body: dict[str, Any]
    named: str


def ask(path: str, named: str, **body: Any) -> Asked:
    """Return a call that is whole; its conversation may be stated."""
    whole: dict[str, Any] = {"model": MODEL, **body}
    if path == MESSAGES:
        whole |= {"max_tokens": 9}
    whole.setdefault("input" if path == RESPONSES else "messages", TURNS)
    return Asked(path=path, body=whole, named=named)


async def header(client: Client, asked: Asked) -> str:
    response = await client.http.post(asked.path, json=asked.body)
    assert response.status_code == 200, response.text
    return str(response.headers.get("x-evenflow-ignored", ""))


def last_chat(executor: FakeExecutor, asked: Asked) -> Any:
    return executor.tokenized[-1].chat if asked.path == COUNT else executor.submits[-1].chat


@pytest_asyncio.fixture
async def plain() -> AsyncIterator[FakeExecutor]:
    """Return an executor whose model's template reads turns and tools alone."""
    executor = FakeExecutor(template_variables=["messages", "tools"])
    await executor.start()
    yield executor
    await executor.kill()


EFFORTS = [
    ask(CHAT, "reasoning_effort", reasoning_effort="high"),
    ask(CHAT, "reasoning_effort", reasoning_effort="none"),
    ask(CHAT, "chat_template_kwargs.enable_thinking", **THINKING_OFF),
    ask(RESPONSES, "reasoning.effort", reasoning={"effort": "low"}),
    ask(MESSAGES, "output_config.effort", output_config={"effort": "high"}),
    ask(MESSAGES, "", thinking={"type": "adaptive"}),
    ask(COUNT, "output_config.effort", output_config={"effort": "high"}),
]


@pytest.mark.parametrize("asked", EFFORTS, ids=lambda asked: f"{asked.path} {asked.named}")
async def test_an_effort_that_a_template_does_not_read_is_left_out(plain, asked: Asked) -> None:
    async with gateway_for(plain) as client:
        await client.wait_ready()

        assert await header(client, asked) == asked.named

        options = last_chat(plain, asked).options
        assert (options.reasoning_effort, options.template_variables) == ("", "")


async def test_a_strict_client_s_effort_is_the_executor_s_to_refuse(plain) -> None:
    asked = ask(CHAT, "", reasoning_effort="high", **THINKING_OFF, **STRICT)
    async with gateway_for(plain) as client:
        await client.wait_ready()

        assert await header(client, asked) == ""

        options = last_chat(plain, asked).options
        assert options.reasoning_effort == "high"
        assert options.template_variables == '{"enable_thinking": false}'


async def test_what_a_template_reads_is_shown_to_it(plain) -> None:
    plain.template_variables = ["enable_thinking", "messages"]
    variables = {"enable_thinking": False, "style": "terse"}
    asked = ask(CHAT, "", reasoning_effort="low", chat_template_kwargs=variables)
    async with gateway_for(plain) as client:
        await client.wait_ready()

        assert await header(client, asked) == "chat_template_kwargs.style"

        options = last_chat(plain, asked).options
        assert options.reasoning_effort == "low"
        assert options.template_variables == '{"enable_thinking": false}'


async def test_an_executor_that_tells_no_variables_gets_them_all(client, executor) -> None:
    asked = ask(CHAT, "", reasoning_effort="high", **THINKING_OFF)

    assert await header(client, asked) == ""
    assert last_chat(executor, asked).options.reasoning_effort == "high"


def result(content: Any) -> list[dict[str, Any]]:
    """Return a conversation of the Messages API that ends with a call's result."""
    outcome = {"type": "tool_result", "tool_use_id": "c", "content": content}
    return [
        *TURNS,
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [outcome]},
    ]


SEEN = {"type": "text", "text": "Seen:"}
OUTPUT = {"type": "function_call_output", "call_id": "c"}
IMAGES = [
    ask(
        CHAT,
        "messages.content.image_url",
        messages=[
            *TURNS,
            {"role": "assistant", "tool_calls": [CALL]},
            {
                "role": "tool",
                "tool_call_id": "c",
                "content": [SEEN, {"type": "image_url", "image_url": {"url": "data:,"}}],
            },
        ],
    ),
    ask(MESSAGES, "messages.content.image", messages=result([SEEN, IMAGE])),
    ask(COUNT, "messages.content.image", messages=result([SEEN, IMAGE])),
    ask(
        MESSAGES,
        "messages.content.image",
        messages=[{"role": "user", "content": [SEEN, IMAGE]}],
    ),
    ask(
        RESPONSES,
        "input.input_image",
        input=[OUTPUT | {"output": [SEEN | {"type": "input_text"}, {"type": "input_image"}]}],
    ),
]


@pytest.mark.parametrize("asked", IMAGES, ids=lambda asked: asked.path)
async def test_an_image_becomes_a_line_of_text(client, executor, asked: Asked) -> None:
    assert await header(client, asked) == asked.named
    assert last_chat(executor, asked).messages[-1].content == f"Seen:\n{LINE}"


@pytest.mark.parametrize("asked", [one for one in IMAGES if one.path != COUNT], ids=str)
async def test_a_strict_client_hears_that_the_model_takes_no_images(client, asked: Asked) -> None:
    response = await client.http.post(asked.path, json=asked.body | STRICT)

    assert response.status_code == 400
    assert "the model takes no images" in response.json()["error"]["message"]


async def test_a_document_of_text_is_read(client, executor) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Once."}
    document = {"type": "document", "source": source, "title": "Tale"}
    asked = ask(MESSAGES, "", messages=result([SEEN, document]))

    assert await header(client, asked) == ""
    assert last_chat(executor, asked).messages[-1].content == "Seen:\nOnce."


async def test_a_document_that_is_no_text_becomes_a_line(client, executor) -> None:
    document = {"type": "document", "source": {"type": "url", "url": "https://example.com/a.pdf"}}
    asked = ask(MESSAGES, "", messages=[{"role": "user", "content": [document]}])

    assert await header(client, asked) == "messages.content.document"
    line = "[document left out: the model takes none]"
    assert last_chat(executor, asked).messages[-1].content == line


@pytest.mark.parametrize("arguments", ['{"city": "Os', "[1]", "5"])
async def test_a_cut_call_of_a_response_has_no_arguments(client, executor, arguments) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    asked = ask(RESPONSES, "", input=[*TURNS, call, OUTPUT | {"output": "cut"}])

    assert await header(client, asked) == "input.arguments"
    (made,) = last_chat(executor, asked).messages[1].tool_calls
    assert made.arguments == "{}"


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (b"\\ud83d", "\N{REPLACEMENT CHARACTER}"),
        (b"\\ude00", "\N{REPLACEMENT CHARACTER}"),
        (b"\\ud83d\\ud83d\\ude00", "\N{REPLACEMENT CHARACTER}\N{GRINNING FACE}"),
        (b"\\\\ud83d", "\\ud83d"),
        (b"\xed\xa0\xbd", "\N{REPLACEMENT CHARACTER}"),
    ],
)
async def test_half_a_character_is_replaced(client, executor, sent: bytes, read: str) -> None:
    turn = b'{"role": "user", "content": "a' + sent + b'b"}'
    content = b'{"model": "%b", "messages": [%b]}' % (MODEL.encode(), turn)

    response = await client.http.post(CHAT, content=content, headers=JSON)

    assert response.status_code == 200, response.text
    assert executor.submits[-1].chat.messages[0].content == f"a{read}b"
