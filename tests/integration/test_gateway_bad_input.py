"""Bad input at both edges: refused in the right shape, by the right name, before the executor."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import pytest_asyncio
from grpc import aio

from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from services.gateway.http.protocol import MAX_HEAD_BYTES
from tests.fake_executor import EVENT_TIMEOUT_S, MODEL, FakeExecutor
from tests.gateways import JSON, Client, chat_body, gateway_for

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONTEXT_LENGTH = 4096  # of the fake executor's model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def executor() -> AsyncIterator[FakeExecutor]:
    executor = FakeExecutor(max_model_len=CONTEXT_LENGTH)
    await executor.start()
    yield executor
    await executor.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(executor: FakeExecutor) -> AsyncIterator[Client]:
    async with gateway_for(executor) as client:
        await client.wait_ready()
        yield client


@pytest.fixture(autouse=True)
def nothing_reached_the_executor(executor: FakeExecutor) -> Any:
    executor.submits.clear()
    yield
    assert executor.submits == []


@pytest.fixture
def stub(client: Client) -> Any:
    return pb_grpc.GatewayServiceStub(client.channel)


@contextmanager
def naming(fault: object) -> Iterator[None]:
    """Say which fault it was that a test fails with."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"at fault: {str(fault)[:200]}")
        raise


def completion_body(**overrides: object) -> dict[str, object]:
    body: dict[str, object] = {"model": MODEL, "prompt": "Hi"}
    return body | overrides


async def post(
    client: Client, path: str, content: bytes, headers: Mapping[str, str | bytes] = JSON
) -> tuple[int, dict[str, Any]]:
    """Return status and error, having checked the shape."""
    response = await client.http.post(path, content=content, headers={**JSON, **headers})
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return response.status_code, error_in(response.content)


def error_in(body: bytes) -> dict[str, Any]:
    decoded = json.loads(body)
    assert list(decoded) == ["error"]
    error: dict[str, Any] = decoded["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def turn(role: object = "user", content: object = "Hi") -> list[dict[str, object]]:
    return [{"role": role, "content": content}]


def call(**overrides: object) -> dict[str, object]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"} | overrides}


CALL_ID = "messages[1].tool_call_id"

# What both endpoints refuse.
SHARED: list[tuple[dict[str, object], str]] = [
    ({"model": 5}, "model"),
    ({"model": None}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2**31 + 0.5}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 257}, "stop"),
    ({"stop": [None]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"user": "u", "evenflow": {"strict": True}}, "user"),
    ({"evenflow": {"slo_tbt_ms": 0}}, "evenflow.slo_tbt_ms"),
    ({"evenflow": {"slo_ttft_ms": "1"}}, "evenflow.slo_ttft_ms"),
    (
        {"evenflow": {"consumption_rate_tps": 9, "slo_tbt_ms": 100}},
        "evenflow.consumption_rate_tps",
    ),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"guided_json": {}}, "guided_json"),
    ({"evenflow": {"strict": True}, "no_such_parameter": 1}, "no_such_parameter"),
]
FUNCTION = {"type": "function", "function": {"name": "f"}}
CHAT_ONLY: list[tuple[dict[str, object], str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
        "tools[0].function.parameters",
    ),
    ({"tools": [FUNCTION, FUNCTION]}, "tools"),
    ({"tools": [FUNCTION] * 4_097}, "tools"),
    ({"tool_choice": FUNCTION}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice"),
    (
        {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    ({"include_reasoning": "no"}, "include_reasoning"),
    ({"reasoning_effort": "utmost"}, "reasoning_effort"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"messages": turn(role="tool")}, "messages[0].tool_call_id"),
    ({"messages": [*turn(), {"role": "user", "tool_call_id": "c", "content": "x"}]}, CALL_ID),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [call()]}]},
        "messages[0].tool_calls",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [call(arguments={})]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        {
            "messages": [{"role": "assistant", "tool_calls": [call(arguments="{")]}],
            "evenflow": {"strict": True},
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [call(name="")]}]},
        "messages[0].tool_calls[0].function.name",
    ),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": turn(role="wizard")}, "messages[0].role"),
    ({"messages": turn(role=5)}, "messages[0].role"),
    ({"messages": turn(content=5)}, "messages[0].content"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
]
COMPLETIONS_ONLY: list[tuple[dict[str, object], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"text": "Hi"}}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1] * CONTEXT_LENGTH}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"logprobs": True}, "logprobs"),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "faults"),
    [(CHAT, SHARED + CHAT_ONLY), (COMPLETIONS, SHARED + COMPLETIONS_ONLY)],
    ids=["chat", "completions"],
)
async def test_a_parameter_at_fault_is_a_400_that_names_it(
    client, executor, path, faults, stream
) -> None:
    make_body = chat_body if path == CHAT else completion_body
    for fault, param in faults:
        body = make_body(stream=stream) | fault

        with naming(fault):
            status, error = await post(client, path, json.dumps(body).encode())

            assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
            assert param in error["message"]
            assert executor.submits == []


NO_OBJECTS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"\xff",
    b"\xff\xfe{}",
    b'{"model": "\xc3\x28"}',  # a cut character
    b'{"temperature": NaN}',
    b'{"temperature": Infinity}',
    b'{"seed":' + b"9" * 5_000 + b"}",
    b"[" * 100_000,
    b'{"model":' + b"[" * 2_000,
]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"a": }', "Expecting value, in line 1 at character 7"),
        (b'{"a": "\xc3\x28"}', "byte 7 is not UTF-8"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"seed":' + b"9" * 5_000 + b"}", "a number has too many digits"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
async def test_what_is_wrong_with_a_body_is_told(client, content, reason) -> None:
    _, error = await post(client, CHAT, content)

    assert error["message"].endswith(reason)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_is_no_json_object_is_a_400(client, executor, path) -> None:
    for content in NO_OBJECTS:
        with naming(content):
            status, error = await post(client, path, content)

            assert (status, error["param"]) == (400, None)
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request")
            assert executor.submits == []


async def test_a_deep_value_is_a_400_that_names_its_parameter(client) -> None:
    status, error = await post(client, CHAT, b'{"model":' + b"[" * 600 + b"]" * 600 + b"}")

    assert (status, error["param"], error["type"]) == (400, "model", "invalid_request_error")


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-tbt-ms"])
async def test_a_bound_that_is_no_number_above_0_is_a_400(client, executor, name) -> None:
    for value in ("", "soon", "0", "-5", "nan", "inf", "1e999", "0x10", "\u0661"):
        headers = {name: value.encode()}
        with naming(value):
            status, error = await post(client, CHAT, json.dumps(chat_body()).encode(), headers)

            assert (status, error["param"]) == (400, name)
            assert executor.submits == []


async def test_a_reader_slower_than_the_bound_between_tokens_is_a_400(client) -> None:
    headers = {"x-consumption-rate-tps": b"9.9", "x-slo-tbt-ms": b"100"}
    status, error = await post(client, CHAT, json.dumps(chat_body()).encode(), headers)

    assert (status, error["param"]) == (400, "x-consumption-rate-tps")


async def exchange(client: Client, *pieces: bytes) -> tuple[int, dict[str, Any]]:
    """Send raw bytes, and return status and error of what comes back before the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.gateway.http_port)
    answer = b""
    try:
        async with asyncio.timeout(EVENT_TIMEOUT_S):
            # A gateway that has answered may have closed too: what came before that counts.
            with suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await client.http.get("/health")  # meanwhile the gateway reads the piece
            with suppress(ConnectionError):
                while received := await reader.read(1 << 16):
                    answer += received
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    return int(head.split()[1]), error_in(body)


POST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
)


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([POST + b"x-y: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n"], id="one"),
        pytest.param([POST + b"x-y: a\r\n" * (MAX_HEAD_BYTES // 4) + b"\r\n"], id="many"),
        pytest.param([b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n"], id="path"),
        # Never ends: what is held of it must end all the same.
        pytest.param([POST + b"x-y: ", b"a" * 40_000, b"a" * 40_000], id="endless"),
    ],
)
async def test_too_large_a_head_is_a_431(client, pieces) -> None:
    status, error = await exchange(client, *pieces)

    assert (status, error["type"]) == (431, "invalid_request_error")


@pytest.mark.parametrize(
    "piece",
    [
        pytest.param(b"x: y\r\n" * 7_000, id="many"),
        pytest.param(b"a" * 40_000, id="endless"),
    ],
)
async def test_too_large_a_trailer_is_a_431(client, piece) -> None:
    begin = POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx-y: z\r\n"
    status, error = await exchange(client, begin, *[piece] * 3)

    assert (status, error["type"]) == (431, "invalid_request_error")


async def test_a_body_in_chunks_has_no_limit_but_its_own(client) -> None:
    """Its parts, all together larger than a head may be, and a trailer are read."""
    content = json.dumps(chat_body(model="other", messages=turn(content="x" * 200_000))).encode()
    parts = [content[place : place + 30_000] for place in range(0, len(content), 30_000)]
    chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts]
    head = POST + b"transfer-encoding: chunked\r\n"
    end = b"0\r\nx-y: z\r\n\r\n"
    status, error = await exchange(client, head + b"connection: close\r\n\r\n", *chunks, end)

    assert (status, error["code"]) == (404, "model_not_found")


async def test_a_head_below_the_limit_is_read(client) -> None:
    response = await client.http.get("/v1/models", headers={"x-y": "a" * (MAX_HEAD_BYTES - 4096)})

    assert response.status_code == 200


@pytest.mark.parametrize(
    "content", [b"what?\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00"]
)
async def test_what_is_no_http_is_a_400(client, content) -> None:
    status, error = await exchange(client, content)

    assert (status, error["type"]) == (400, "invalid_request_error")


# gRPC


def make_chat(**overrides: Any) -> pb.ChatRequest:
    fields = {"model": MODEL, "messages": [gen.ChatMessage(role="user", content="Hi")]}
    return pb.ChatRequest(**(fields | overrides))


def make_generate(**overrides: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**({"model": MODEL, "text": "Hi"} | overrides))


def sampled(**fields: Any) -> dict[str, Any]:
    return {"sampling": gen.SamplingParams(**fields)}


GRPC_FAULTS: list[tuple[Any, str]] = [
    (make_chat(model=""), "model"),
    (make_chat(messages=[]), "messages"),
    (make_chat(messages=[gen.ChatMessage(role="user", content="x")] * 4_097), "messages"),
    (make_chat(messages=[gen.ChatMessage(content="Hi")]), "messages[0].role"),
    (make_chat(messages=[gen.ChatMessage(role="wizard", content="Hi")]), "messages[0].role"),
    (
        make_chat(options=gen.ConversationOptions(tools=[gen.Tool(name="a b")])),
        "options.tools[0].name",
    ),
    (
        make_chat(options=gen.ConversationOptions(tools=[gen.Tool(name="f", parameters="[]")])),
        "options.tools[0].parameters",
    ),
    (
        make_chat(options=gen.ConversationOptions(tool_choice=gen.TOOL_CHOICE_REQUIRED)),
        "options.tool_choice",
    ),
    (make_chat(options=gen.ConversationOptions(tool_choice=99)), "options.tool_choice"),  # type: ignore[arg-type]
    (make_chat(options=gen.ConversationOptions(named_tool="f")), "options.tool_choice"),
    (
        make_chat(options=gen.ConversationOptions(reasoning_effort="utmost")),
        "options.reasoning_effort",
    ),
    (
        make_chat(options=gen.ConversationOptions(template_variables="x")),
        "options.template_variables",
    ),
    (make_chat(messages=[gen.ChatMessage(role="tool")]), "messages[0].tool_call_id"),
    (make_generate(model=""), "model"),
    (make_generate(text=""), "text"),
    (pb.GenerateRequest(model=MODEL), "prompt"),
    (make_generate(text=None, token_ids=gen.TokenIds()), "token_ids"),
    (make_generate(text=None, token_ids=gen.TokenIds(ids=[-1])), "token_ids"),
    (make_generate(**sampled(max_tokens=0)), "sampling.max_tokens"),
    (make_chat(**sampled(temperature=2.1)), "sampling.temperature"),
    (make_chat(**sampled(top_p=0)), "sampling.top_p"),
    (make_chat(**sampled(stop=[""])), "sampling.stop"),
    (make_chat(**sampled(stop=["a" * 257])), "sampling.stop"),
    (
        make_chat(**sampled(structured_outputs=gen.StructuredOutputs())),
        "sampling.structured_outputs",
    ),
    (make_chat(service_level=gen.ServiceLevel(slo_tbt_s=0)), "service_level.slo_tbt_s"),
    (
        make_chat(service_level=gen.ServiceLevel(consumption_rate_tps=9, slo_tbt_s=0.1)),
        "service_level.consumption_rate_tps",
    ),
]


TOO_LONG: list[tuple[Any, str]] = [
    (make_generate(text=None, token_ids=gen.TokenIds(ids=[1] * CONTEXT_LENGTH)), "prompt"),
]


@pytest.mark.parametrize(
    ("faults", "reason"),
    [(GRPC_FAULTS, "INVALID_REQUEST"), (TOO_LONG, "CONTEXT_LENGTH_EXCEEDED")],
    ids=["wrong", "too-long"],
)
async def test_a_field_at_fault_is_invalid_and_named(stub, executor, faults, reason) -> None:
    for request, field in faults:
        call = stub.Chat if isinstance(request, pb.ChatRequest) else stub.Generate
        with naming(request):
            with pytest.raises(aio.AioRpcError) as refused:
                await call(request).read()

            assert refused.value.code().name == "INVALID_ARGUMENT"
            assert dict(refused.value.trailing_metadata())["error-reason"] == reason
            assert field in str(refused.value.details())
            assert executor.submits == []


@pytest.mark.parametrize(
    "content",
    [
        b"\x0a\xff",  # a field that ends before its length
        b"\x0a\x02\xc3\x28",  # a string that is no UTF-8
        b"\x07",  # a tag that there is none of
    ],
)
async def test_what_is_no_message_is_refused(client, content) -> None:
    call = client.channel.unary_stream("/evenflow.gateway.v1.GatewayService/Chat")

    with pytest.raises(aio.AioRpcError) as refused:
        await call(content).read()

    assert refused.value.code().name == "INVALID_ARGUMENT"


async def test_fields_of_a_later_version_are_left_alone(client, executor) -> None:
    call = client.channel.unary_stream("/evenflow.gateway.v1.GatewayService/Chat")
    unknown_field = b"\xf8\x3f\x05"  # number 1023

    first = await call(make_chat().SerializeToString() + unknown_field).read()

    assert first is not aio.EOF
    assert len(executor.submits) == 1
    executor.submits.clear()


LONG_NAME = "\N{GRINNING FACE}" * 20_000


async def test_an_error_repeats_little_of_what_was_sent(client, stub) -> None:
    unknown_model = json.dumps(chat_body(model=LONG_NAME)).encode()
    strict = {"evenflow": {"strict": True}}
    unknown_parameter = json.dumps(chat_body() | strict | {LONG_NAME: 1}).encode()
    for body in (unknown_model, unknown_parameter):
        _, error = await post(client, CHAT, body)
        assert len(error["message"].encode()) <= 1_024
        assert len((error["param"] or "").encode()) <= 1_024

    with pytest.raises(aio.AioRpcError) as refused:
        await stub.Chat(make_chat(model=LONG_NAME)).read()
    assert refused.value.code().name == "NOT_FOUND"
    assert str(refused.value.details()).startswith('the model "\N{GRINNING FACE}')
    assert str(refused.value.details()).endswith("...")


async def test_too_much_metadata_is_refused(stub) -> None:
    with pytest.raises(aio.AioRpcError) as refused:
        await stub.Chat(make_chat(), metadata=(("x-y", "a" * MAX_HEAD_BYTES),)).read()

    assert refused.value.code().name == "RESOURCE_EXHAUSTED"
