"""The stock `openai` package against the gateway."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest

from tests.fake_executor import MODEL, NUM_PROMPT_TOKENS, Script
from tests.gateways import Client

MESSAGES = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
async def sdk(client: Client) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{client.base_url}/v1", api_key="unused", max_retries=0
    ) as sdk:
        yield sdk


async def in_thread(client: Client, use: Callable[[openai.OpenAI], Any]) -> Any:
    """Use the synchronous SDK while the gateway runs in this event loop."""

    def run() -> Any:
        with openai.OpenAI(
            base_url=f"{client.base_url}/v1", api_key="unused", max_retries=0
        ) as sdk:
            return use(sdk)

    return await asyncio.to_thread(run)


async def test_the_synchronous_client_gets_whole_answers(client) -> None:
    chat = await in_thread(
        client, lambda sdk: sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    )
    completion = await in_thread(
        client, lambda sdk: sdk.completions.create(model=MODEL, prompt="Say hello.")
    )

    assert chat.choices[0].message.content == completion.choices[0].text == "Hello, world"
    assert chat.choices[0].finish_reason == completion.choices[0].finish_reason == "stop"
    assert chat.usage.prompt_tokens == completion.usage.prompt_tokens == NUM_PROMPT_TOKENS


async def test_the_synchronous_client_streams(client) -> None:
    def use(sdk: openai.OpenAI) -> list[Any]:
        return list(
            sdk.chat.completions.create(
                model=MODEL,
                messages=MESSAGES,
                stream=True,
                stream_options={"include_usage": True},
            )
        )

    chunks = await in_thread(client, use)

    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert texts == ["Hello", ",", " world"]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 3)


async def test_the_asynchronous_client_streams_both_endpoints(sdk) -> None:
    chat = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    chat_text = "".join([c.choices[0].delta.content or "" async for c in chat])
    completion = await sdk.completions.create(model=MODEL, prompt="Say hello.", stream=True)
    completion_text = "".join([c.choices[0].text async for c in completion])

    assert chat_text == completion_text == "Hello, world"


async def test_the_helper_that_accumulates_a_stream_works(sdk) -> None:
    async with sdk.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        answer = await stream.get_final_completion()

    assert answer.choices[0].message.content == "Hello, world"


async def test_the_extension_object_goes_through_extra_body(sdk, executor) -> None:
    await sdk.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        extra_body={"evenflow": {"slo_tpot_ms": 125}},
        extra_headers={"x-slo-ttft-ms": "250"},
    )

    level = executor.submits[0].service_level
    assert (level.slo_tpot_s, level.slo_ttft_s) == (0.125, 0.25)


async def test_closing_a_stream_aborts_the_request(client, sdk, executor) -> None:
    executor.script.ending.clear()
    stream = await sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, extra_headers={"x-request-id": "left"}
    )
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()

    await executor.until(lambda: executor.aborted == ["left"])
    await client.wait_idle()


async def test_an_error_inside_a_stream_is_raised(sdk, executor) -> None:
    executor.script.ending.clear()
    stream = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    texts: list[str] = []

    async def read_all() -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")
            if len(texts) == 4:  # role and three tokens
                await executor.kill()

    with pytest.raises(openai.APIError, match="connection to the executor was lost"):
        await read_all()
    assert "".join(texts) == "Hello, world"


async def test_errors_are_the_sdk_s_classes(client, sdk, executor) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, n=0)
    with pytest.raises(openai.NotFoundError) as unknown:
        await sdk.chat.completions.create(model="other", messages=MESSAGES)
    await executor.kill()
    with pytest.raises(openai.InternalServerError) as down:
        await sdk.chat.completions.create(model=MODEL, messages=MESSAGES)

    assert bad.value.param == "n"
    assert unknown.value.code == "model_not_found"
    assert down.value.status_code == 503
    assert bad.value.request_id.startswith("req-")


async def test_models_are_listed_and_found(sdk) -> None:
    assert [model.id async for model in sdk.models.list()] == [MODEL]
    assert (await sdk.models.retrieve(MODEL)).id == MODEL


async def test_text_of_any_script_survives(sdk, executor) -> None:
    texts = ["naïve ", "日本語", "🙂", "\u2028", "\x85", "\r\n"]
    executor.script = Script(texts=texts)

    stream = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)

    assert [c.choices[0].delta.content async for c in stream][1:-1] == texts
