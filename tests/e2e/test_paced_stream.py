"""What a user sees: OpenAI SDK and gRPC clients, paced when asked, untouched when not."""

import asyncio
import json
import statistics
from itertools import pairwise

import grpc
import httpx
import openai
import pytest

from evenflow.executor.v1 import executor_pb2, executor_pb2_grpc
from evenflow.tracker.v1 import tracker_pb2
from lab.models import MAX_MODEL_LEN
from lab.stack.processes import MODEL, RPC_TIMEOUT_S, Stack, wait_until
from services.kit.rpc import name_of_request
from tests.clients import (
    CLIENT_TIMEOUT_S,
    Received,
    chat_body,
    grpc_chat,
    http_chat,
    recorded,
)
from tests.live_streams import num_in_engine
from tests.slow_reader import ask_and_wait, text_of

pytestmark = pytest.mark.timeout(3_600)

RATE_TPS, NUM_PACED = 10.0, 20
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


def test_the_next_turn_says_how_many_of_its_tokens_were_cached_streamed_and_whole(client) -> None:
    asked = [{"role": "user", "content": "Columns of blocks, one after the other. " * 100}]
    options = {"model": MODEL, "max_tokens": 24, "temperature": 0}
    first = client.chat.completions.create(messages=asked, **options)
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    asked += [answer, {"role": "user", "content": "And after these?"}]

    whole = client.chat.completions.create(messages=asked, **options)
    *_, last = client.chat.completions.create(
        messages=asked, stream=True, stream_options={"include_usage": True}, **options
    )

    assert first.usage.prompt_tokens_details.cached_tokens == 0
    for usage in (whole.usage, last.usage):
        assert usage.prompt_tokens > first.usage.prompt_tokens
        num_cached = usage.prompt_tokens_details.cached_tokens
        assert first.usage.prompt_tokens / 2 < num_cached < usage.prompt_tokens


UNITS = {"type": "object", "properties": {"u": {"enum": ["C", "F"]}}, "required": ["u"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": UNITS}}


def calling(stack: Stack, **options):
    """Return what makes an untrained model call a function: it must, and writes no blanks."""
    body = {"model": MODEL, "prompt": " \n\t\r  \n\n    ", "add_special_tokens": False}
    tokens = httpx.post(f"{stack.base_url}/tokenize", json=body, timeout=RPC_TIMEOUT_S)
    blanks = tokens.json()["tokens"]
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


def test_an_aborted_stream_frees_the_engine(stack: Stack, client) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=MAX_MODEL_LEN - 256,
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
        lambda: (
            "aborted" in (records := recorded(stack))
            and records["aborted"].state == tracker_pb2.REQUEST_STATE_CANCELLED
        ),
        "the tracker says cancelled",
    )


async def test_a_reader_that_stops_is_held_in_the_engine_and_loses_nothing(stack: Stack) -> None:
    """What sockets take, and 256 tokens more, is a small part of the answer: events are large."""
    num_tokens = 1_900
    asked = asyncio.create_task(
        http_chat(stack.base_url, "Go on.", max_tokens=num_tokens, request_id="attentive")
    )
    body = chat_body("Go on.", max_tokens=num_tokens, stream=True, logprobs=True, top_logprobs=20)
    async with ask_and_wait(
        stack.ports["http"], body, request_id="away", receive_buffer_bytes=8 << 10
    ) as reader:
        await asyncio.to_thread(wait_until, lambda: is_paused(stack, "away"), "it is held")
        events = await reader.rest(CLIENT_TIMEOUT_S)

    attentive = await asked
    assert events[-1] == "[DONE]"
    assert text_of(events) == attentive.text
    assert attentive.num_output_tokens == num_tokens


def is_paused(stack: Stack, request_id: str) -> bool:
    with grpc.insecure_channel(stack.address("executor")) as channel:
        updates = executor_pb2_grpc.ExecutorServiceStub(channel).WatchRequests(
            executor_pb2.WatchRequestsRequest(), timeout=RPC_TIMEOUT_S
        )
        try:
            update = next(iter(updates))
        except grpc.RpcError:
            return False
    return any(
        name_of_request(r.request_id) == request_id and r.state == executor_pb2.REQUEST_STATE_PAUSED
        for r in update.requests
    )


async def test_a_stated_reading_rate_paces_every_token(stack: Stack) -> None:
    got = await read_slowly(stack, "paced")

    # Token k is due k intervals after the first, and never comes before that.
    assert got.token_indices == list(range(NUM_PACED))
    for k, at_s in enumerate(got.arrived_s):
        assert at_s - got.sent_s >= k / RATE_TPS


@pytest.mark.nightly
async def test_the_gaps_of_a_paced_stream_are_those_of_its_rate(stack: Stack) -> None:
    got = await read_slowly(stack, "even")

    # The engine needs some 10 ms a token, reading 100 ms. What the machine adds to one token (or
    # to the first) is noise of some 10 ms.
    gaps_s = [b - a for a, b in pairwise(got.arrived_s)]
    assert statistics.median(gaps_s) == pytest.approx(1 / RATE_TPS, abs=0.02)


async def read_slowly(stack: Stack, request_id: str) -> Received:
    return await grpc_chat(
        stack.address("gateway"),
        "Read slowly.",
        max_tokens=NUM_PACED,
        request_id=request_id,
        rate_tps=RATE_TPS,
    )


async def test_over_http_the_answer_takes_as_long_as_reading_it(stack: Stack) -> None:
    options = {"max_tokens": NUM_PACED, "rate_tps": RATE_TPS}
    reference = await grpc_chat(
        stack.address("gateway"), "Read slowly.", max_tokens=NUM_PACED, request_id="unpaced"
    )
    got = await http_chat(stack.base_url, "Read slowly.", request_id="paced-http", **options)

    # The last piece of text belongs to the last token, or to one of the few before it.
    assert got.text == reference.text
    assert got.arrived_s[-1] - got.sent_s >= (NUM_PACED - 5) / RATE_TPS


async def test_one_request_id_goes_through_all_services(stack: Stack) -> None:
    got = await http_chat(stack.base_url, "Trace me.", max_tokens=4, request_id="trace-me")

    assert got.num_output_tokens == 4
    for known, where in (
        (lambda: "trace-me" in recorded(stack), "tracker"),
        (lambda: '"request_id": "trace-me"' in stack.log("gateway"), "gateway log"),
        (lambda: '"request_id": "trace-me:' in stack.log("executor"), "executor log"),
    ):
        await asyncio.to_thread(wait_until, known, f"the id is in the {where}")
