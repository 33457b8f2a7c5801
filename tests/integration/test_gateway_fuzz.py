"""Whatever comes in, at either edge: an answer or a refusal, never a failure of ours."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from google.protobuf.message import Message
from grpc import aio
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from lab.drawn_messages import messages_of
from services.gateway.openai.bodies import ChatCompletionBody, CompletionBody
from tests.fake_executor import MODEL
from tests.fuzz import examples
from tests.gateway_thread import Edge, running_edge
from tests.gateways import JSON

FUZZ = settings(max_examples=examples(150))
pytestmark = pytest.mark.timeout(3_600)  # at night there are many more examples
REFUSALS = ("INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED")


@pytest.fixture(scope="module")
def edge() -> Iterator[Edge]:
    with running_edge() as edge:
        yield edge


# JSON bodies: the parameters that there are, with values right and wrong.

numbers = st.integers(-3, 30) | st.floats(-3, 3) | st.sampled_from([2**31, 2**63, 1e308, -1e-320])
texts = st.sampled_from(
    ["", "a", MODEL, "user", "json_object", "json_schema", "text", "\0", "é\u2028"]
)
names = st.sampled_from(
    ["role", "content", "type", "schema", "json_schema", "include_usage", "regex", "choice"]
) | st.sampled_from(["slo_tbt_ms", "consumption_rate_tps", "pace_tail", "5", "x"])
flat = st.none() | st.booleans() | numbers | texts
nested = st.lists(flat, max_size=3) | st.dictionaries(names, flat, max_size=3)
values = flat | nested | st.lists(nested, max_size=2) | st.dictionaries(names, nested, max_size=2)
good = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hi"}],
    "prompt": "Hi",
}


def bodies(body_class: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Return bodies of the right kind with up to four parameters of any value."""
    names = sorted({*body_class.model_fields, "no_such_parameter"})
    base = {name: good[name] for name in body_class.model_fields if name in good}
    return st.dictionaries(st.sampled_from(names), values, max_size=4).map(lambda some: base | some)


def check(response: httpx.Response) -> None:
    assert response.status_code in (200, 400, 404, 413, 415, 429), response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        json.loads(response.text, parse_constant=refuse)


def refuse(name: str) -> None:
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("path", "body_class"),
    [("/v1/chat/completions", ChatCompletionBody), ("/v1/completions", CompletionBody)],
)
def test_any_body_is_answered_or_refused(edge, path, body_class) -> None:
    @FUZZ
    @given(bodies(body_class))
    def fuzz(body: dict[str, Any]) -> None:
        check(edge.run(edge.client.http.post(path, content=json.dumps(body), headers=JSON)))

    fuzz()


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
def test_any_bytes_are_answered_or_refused(edge, path) -> None:
    @FUZZ
    @given(st.binary(max_size=40) | values.map(lambda value: json.dumps(value).encode()))
    def fuzz(content: bytes) -> None:
        check(edge.run(edge.client.http.post(path, content=content, headers=JSON)))

    fuzz()


def test_any_header_is_answered_or_refused(edge) -> None:
    body = {"model": MODEL, "prompt": "Hi"}
    names = ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-tbt-ms", "x-consumption-rate-tps"]
    names += ["x-request-id", "content-type", "content-encoding", "accept", "authorization"]
    text = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=12).map(str.strip)
    lines = st.dictionaries(st.sampled_from(names), text | numbers.map(str), min_size=1, max_size=3)

    @FUZZ
    @given(lines)
    def fuzz(headers: dict[str, str]) -> None:
        encoded = {name: value.encode("latin-1") for name, value in headers.items()}
        check(
            edge.run(edge.client.http.post("/v1/completions", json=body, headers=encoded))  # type: ignore[arg-type]
        )

    fuzz()


@pytest.mark.parametrize(
    ("call", "request_class"), [("Generate", pb.GenerateRequest), ("Chat", pb.ChatRequest)]
)
def test_any_message_is_answered_or_refused(edge, call, request_class) -> None:
    stub = pb_grpc.GatewayServiceStub(edge.client.channel)

    async def read(request: Message) -> str:
        try:
            parts = [part async for part in getattr(stub, call)(request)]
        except aio.AioRpcError as error:
            return error.code().name
        return "OK" if parts[-1].HasField("finish") else "cut"

    good_fields: dict[str, Any] = {"model": MODEL}
    if call == "Chat":
        good_fields["messages"] = good["messages"]

    @FUZZ
    @given(messages_of(request_class.DESCRIPTOR, texts), st.booleans())
    def fuzz(fields: dict[str, Any], is_well_addressed: bool) -> None:
        request = request_class(**fields | (good_fields if is_well_addressed else {}))
        assert edge.run(read(request)) in ("OK", *REFUSALS)

    fuzz()


def test_any_bytes_over_grpc_are_answered_or_refused(edge) -> None:
    call: Callable[[bytes], Any] = edge.client.channel.unary_stream(
        "/evenflow.gateway.v1.GatewayService/Generate"
    )

    async def read(content: bytes) -> str:
        try:
            await call(content).read()
        except aio.AioRpcError as error:
            return error.code().name
        return "OK"

    @FUZZ
    @given(st.binary(max_size=60))
    def fuzz(content: bytes) -> None:
        assert edge.run(read(content)) in ("OK", *REFUSALS)

    fuzz()
