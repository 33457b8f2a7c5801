"""What a user sees: OpenAI SDK and gRPC clients, paced when asked, untouched when not."""

import asyncio
import json
import statistics
from itertools import pairwise

import grpc
import httpx
import openai
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from evenflow.executor.v1 import executor_pb2, executor_pb2_grpc
from evenflow.tracker.v1 import tracker_pb2
from tests.clients import chat_body, grpc_chat, http_chat, recorded
from tests.live_streams import num_in_engine
from tests.processes import MODEL, Stack, wait_until
from tests.slow_reader import ask_and_wait, text_of

pytestmark = pytest.mark.timeout(300)

MESSAGES = [{"role": "user", "content": "What comes next?"}]


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="unused", max_retries=0)


def ask(client: openai.OpenAI, **options):
    return client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=24, temperature=0, **options
    )


def test_the_openai_sdk_gets_the_same_answer_streamed_and_whole(client) -> None:
    whole = ask(client)
    stream = list(ask(client, stream=True, stream_options={"include_usage": True}))

    streamed = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert streamed == whole.choices[0].message.content
    assert streamed
    assert stream[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert whole.choices[0].finish_reason == "length"


async def test_the_async_sdk_streams_too(stack: Stack, client) -> None:
    whole = ask(client)
    async with openai.AsyncOpenAI(base_url=f"{stack.base_url}/v1", api_key="unused") as sdk:
        stream = await ask(sdk, stream=True)
        pieces = [c.choices[0].delta.content or "" async for c in stream if c.choices]

    assert "".join(pieces) == whole.choices[0].message.content


def test_completions_take_text(client) -> None:
    answer = client.completions.create(model=MODEL, prompt="The for statement", temperature=0)

    assert answer.usage.completion_tokens == 16  # OpenAI's default
    assert answer.choices[0].text


def test_seeded_sampling_repeats(client) -> None:
    first, second, other = (
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=24, temperature=1, seed=seed
        )
        .choices[0]
        .message.content
        for seed in (7, 7, 8)
    )

    assert first == second != other


def test_a_stop_string_ends_the_answer_before_it(client) -> None:
    whole = ask(client).choices[0].message.content
    stop = whole[len(whole) // 2 :][:3]

    stopped = ask(client, stop=[stop]).choices[0]

    assert stopped.finish_reason == "stop"
    assert stopped.message.content == whole[: whole.index(stop)]


UNITS = {"type": "object", "properties": {"u": {"enum": ["C", "F"]}}, "required": ["u"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": UNITS}}


def calling(stack: Stack, **options):
    """Return what makes an untrained model call a function: it must, and writes no blanks."""
    body = {"model": MODEL, "prompt": " \n\t\r  \n\n    ", "add_special_tokens": False}
    blanks = httpx.post(f"{stack.base_url}/tokenize", json=body).json()["tokens"]
    return {
        "model": MODEL,
        "messages": MESSAGES,
        "tools": [TOOL],
        "logit_bias": {str(id): -100 for id in blanks},
        "temperature": 1,
        "seed": 3,
        "max_tokens": 400,
        **options,
    }


def test_a_required_call_is_made_in_the_model_s_form_and_read_from_it(stack: Stack, client) -> None:
    options = calling(stack, tool_choice="required", parallel_tool_calls=False)
    (choice,) = client.chat.completions.create(**options).choices
    with client.chat.completions.stream(**options) as stream:
        streamed = stream.get_final_completion().choices[0]

    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["u"] in ("C", "F")
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    assert streamed.finish_reason == "tool_calls"


def test_a_named_call_is_made_at_the_reader_s_pace(stack: Stack, client) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    options = calling(stack, tool_choice=named)
    with client.chat.completions.stream(
        **options, extra_headers={"x-consumption-rate-tps": "50"}
    ) as stream:
        (choice,) = stream.get_final_completion().choices

    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    assert json.loads(choice.message.tool_calls[0].function.arguments)["u"] in ("C", "F")
    assert choice.finish_reason == "stop"


def test_tools_may_be_left_alone(stack: Stack, client) -> None:
    for choice in ("auto", "none"):
        answer = ask(client, tools=[TOOL], tool_choice=choice).choices[0]

        assert answer.message.tool_calls is None
        assert answer.finish_reason == "length"


def test_models_are_listed(client) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@pytest.mark.parametrize(
    ("option", "value"),
    [("user", "me"), ("service_tier", "flex"), ("store", True), ("temperature", 2.5)],
)
def test_what_is_not_offered_is_refused_by_name(client, option, value) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, **{option: value})

    assert caught.value.param == option


def test_a_prompt_longer_than_the_context_is_refused(client) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "word " * 4_000}]
        )

    assert caught.value.code == "context_length_exceeded"


def test_an_aborted_stream_frees_the_engine(stack: Stack, client) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=1_900,
        temperature=0,  # greedy answers do not end by themselves
        stream=True,
        extra_headers={"x-request-id": "aborted", "x-consumption-rate-tps": "20"},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    stream.close()

    wait_until(lambda: num_in_engine(stack) == 0, "the engine forgets the request")
    wait_until(
        lambda: recorded(stack)["aborted"].state == tracker_pb2.REQUEST_STATE_CANCELLED,
        "the tracker says cancelled",
    )


async def test_a_reader_that_stops_is_held_in_the_engine_and_loses_nothing(stack: Stack) -> None:
    """What sockets take, and 256 tokens more, is less than the answer."""
    num_tokens = 1_900
    asked = asyncio.create_task(
        http_chat(stack.base_url, "Go on.", max_tokens=num_tokens, request_id="attentive")
    )
    body = chat_body("Go on.", max_tokens=num_tokens, stream=True)
    async with ask_and_wait(
        stack.ports["http"], body, request_id="away", receive_buffer_bytes=8 << 10
    ) as reader:
        await asyncio.to_thread(wait_until, lambda: is_paused(stack, "away"), "it is held")
        events = await reader.rest(60.0)

    attentive = await asked
    assert events[-1] == "[DONE]"
    assert text_of(events) == attentive.text
    assert attentive.num_output_tokens == num_tokens


def is_paused(stack: Stack, request_id: str) -> bool:
    with grpc.insecure_channel(stack.address("executor")) as channel:
        updates = executor_pb2_grpc.ExecutorServiceStub(channel).WatchRequests(
            executor_pb2.WatchRequestsRequest(), timeout=10
        )
        update = next(iter(updates))
    return any(
        r.request_id == request_id and r.state == executor_pb2.REQUEST_STATE_PAUSED
        for r in update.requests
    )


def test_a_client_that_leaves_before_the_answer_frees_the_engine(stack: Stack) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{stack.base_url}/v1/chat/completions",
            json=chat_body("Never mind.", max_tokens=1_900),
            timeout=httpx.Timeout(30, read=0.5),
        )

    wait_until(lambda: num_in_engine(stack) == 0, "the engine forgets the request")


async def test_a_stated_reading_rate_paces_every_token(stack: Stack) -> None:
    rate_tps, num_tokens = 10.0, 30
    got = await grpc_chat(
        stack.address("gateway"),
        "Read slowly.",
        max_tokens=num_tokens,
        request_id="paced",
        rate_tps=rate_tps,
    )

    # The engine needs some 10 ms a token, reading 100 ms: token k is due k intervals after the
    # first. What the machine adds to one token (or to the first) is noise of some 10 ms.
    gaps_s = [b - a for a, b in pairwise(got.arrived_s)]
    assert got.token_indices == list(range(num_tokens))
    assert statistics.median(gaps_s) == pytest.approx(1 / rate_tps, abs=0.02)
    assert sum(gaps_s) > (num_tokens - 1) / rate_tps - 0.25


async def test_over_http_the_answer_takes_as_long_as_reading_it(stack: Stack) -> None:
    rate_tps, num_tokens = 10.0, 20
    options = {"max_tokens": num_tokens, "rate_tps": rate_tps}
    reference = await grpc_chat(
        stack.address("gateway"), "Read slowly.", max_tokens=num_tokens, request_id="unpaced"
    )
    got = await http_chat(stack.base_url, "Read slowly.", request_id="paced-http", **options)

    # The last piece of text belongs to the last token, or to one of the few before it.
    assert got.text == reference.text
    assert got.arrived_s[-1] - got.arrived_s[0] > (num_tokens - 5) / rate_tps


def test_without_pace_tail_the_rest_comes_when_generation_ends(stack: Stack) -> None:
    answer = httpx.post(
        f"{stack.base_url}/v1/chat/completions",
        json=chat_body(
            "Quick.", max_tokens=60, stream=True, evenflow={"consumption_rate_tps": 1.0}
        ),
        timeout=50,  # at one token a second the answer would take 59 s
    )

    assert answer.text.endswith("data: [DONE]\n\n")


async def test_without_a_rate_tokens_are_not_held_back(stack: Stack) -> None:
    slow_rate_tps, num_tokens = 10.0, 60
    free = await http_chat(stack.base_url, "As it comes.", max_tokens=num_tokens, request_id="free")

    # Paced at this rate the answer would take 5.9 s; the engine needs a fraction of it.
    assert free.num_output_tokens == num_tokens
    assert free.arrived_s[-1] - free.arrived_s[0] < (num_tokens - 1) / slow_rate_tps / 2


async def test_a_client_built_from_reflection_gets_the_answer(stack: Stack) -> None:
    reference = await grpc_chat(
        stack.address("gateway"), "What comes next?", max_tokens=8, request_id="stubbed"
    )

    assert await asyncio.to_thread(reflected_chat, stack, "What comes next?", 8) == reference.text


def reflected_chat(stack: Stack, prompt: str, max_tokens: int) -> str:
    """Chat with nothing but what the server says of itself."""
    name = "evenflow.gateway.v1.GatewayService"
    with grpc.insecure_channel(stack.address("gateway")) as channel:
        pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName(name).FindMethodByName("Chat")
        request = message_factory.GetMessageClass(method.input_type)(
            model=MODEL,
            messages=[{"role": "user", "content": prompt}],
            sampling={"max_tokens": max_tokens, "temperature": 0},
        )
        call = channel.unary_stream(
            f"/{name}/Chat",
            request_serializer=type(request).SerializeToString,
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        return "".join(token.text for answer in call(request) for token in answer.tokens)


async def test_one_request_id_goes_through_all_services(stack: Stack) -> None:
    got = await http_chat(stack.base_url, "Trace me.", max_tokens=4, request_id="trace-me")

    assert got.num_output_tokens == 4
    for known, where in (
        (lambda: "trace-me" in recorded(stack), "tracker"),
        (lambda: '"request_id": "trace-me"' in stack.log_tail("gateway"), "gateway log"),
        (lambda: '"request_id": "trace-me"' in stack.log_tail("executor"), "executor log"),
    ):
        await asyncio.to_thread(wait_until, known, f"the id is in the {where}")
