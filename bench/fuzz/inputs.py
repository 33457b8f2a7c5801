"""What is sent: drawn by Hypothesis, HTTP also from `/openapi.json` by schemathesis, then changed.

`python -m bench.fuzz.inputs SEED` prints batches, pickled and in Base64, without end.
"""

import base64
import json
import pickle
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from bench.fuzz.executor import LONG
from bench.fuzz.types import Input, Kind
from bench.gateway.synthetic_executor import MODEL
from evenflow.gateway.v1 import gateway_pb2 as pb
from lab.drawn_messages import messages_of
from services.gateway.http.openapi import openapi_document

ROUND = 20  # of one strategy
BATCH = 500  # in a line
MUTANTS = 160  # of each HTTP request that was drawn, beside itself


flat = (
    st.none()
    | st.booleans()
    | st.integers(-3, 30)
    | st.floats(-3, 3)
    | st.sampled_from([2**31, 2**63, 1e308, -1e-320, "", "a", MODEL, "user", "\0", "é\u2028", LONG])
    | st.text(max_size=12)
)
names = st.sampled_from(["role", "content", "type", "schema", "json_schema", "regex", "name", "x"])
nested = st.lists(flat, max_size=3) | st.dictionaries(names, flat, max_size=3)
values = flat | nested | st.lists(nested, max_size=2) | st.dictionaries(names, nested, max_size=2)
header_text = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=16)
header_names = st.sampled_from(
    [
        "accept",
        "authorization",
        "connection",
        "content-encoding",
        "content-type",
        "expect",
        "host",
        "origin",
        "range",
        "te",
        "traceparent",
        "transfer-encoding",
        "upgrade",
        "x-api-key",
        "x-consumption-rate-tps",
        "x-request-id",
        "x-slo-tbt-ms",
        "x-slo-tpot-ms",
        "x-slo-ttft-ms",
    ]
)
message_texts = st.sampled_from(["", "a", MODEL, "user", LONG]) | st.text(max_size=9)
headers = st.dictionaries(header_names, header_text | flat.map(str), max_size=3)
targets = st.sampled_from(
    ["/", "/v1/models", "/v1/models/x", "/tokenize", "//", "*", "http://x/", "/v1/../health?a=%00"]
) | st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20).map("/{}".format)
_GOOD = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hi"}],
    "prompt": "Hi",
    "input": "Hi",
    "tokens": [72, 105],
    "max_tokens": 4,
}
_ORDINARY = {"host": "localhost", "content-type": "application/json"}
_DOCUMENT = openapi_document("0")
_BODIES = {
    path: _DOCUMENT["components"]["schemas"][
        item["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
    ]["properties"]
    for path, item in _DOCUMENT["paths"].items()
    if "requestBody" in item.get("post", {})
}


def rendered(
    method: str, target: str, lines: dict[str, str], body: bytes, cuts: tuple[int, ...] = ()
) -> bytes:
    """Return an HTTP request. With cuts, its body goes in chunks of these sizes."""
    framing = {"transfer-encoding": "chunked"} if cuts else {"content-length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in (_ORDINARY | lines | framing).items())
    begun = f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode("latin-1", "replace")
    return begun + (_chunked(body, cuts) if cuts else body)


def _chunked(body: bytes, sizes: tuple[int, ...]) -> bytes:
    chunks, rest = b"", body
    for size in sizes:
        piece, rest = rest[:size], rest[size:]
        chunks += b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""
    chunks += b"%x\r\n%b\r\n" % (len(rest), rest) if rest else b""
    return chunks + b"0\r\n\r\n"


@st.composite
def requests(draw: st.DrawFn) -> Input:
    """Draw a call of an operation, good but for some members of any value."""
    path = draw(st.sampled_from(sorted(_BODIES)))
    known = _BODIES[path]
    some = draw(st.dictionaries(st.sampled_from(sorted([*known, "no_such"])), values, max_size=4))
    body = {name: value for name, value in _GOOD.items() if name in known} | some
    if path == "/tokenize" and draw(st.booleans()):
        body.pop("messages", None)
    sizes = draw(st.lists(st.integers(1, 40), max_size=4).map(tuple))
    clean = {k: v for k, v in draw(headers).items() if k not in ("transfer-encoding", "connection")}
    clean = {k: "".join(c for c in v if c.isprintable()).strip() for k, v in clean.items()}
    clean.pop("expect", None)
    clean.pop("upgrade", None)
    content = json.dumps(body).encode()
    return Input(kind=Kind.REQUEST, content=rendered("POST", path, clean, content, sizes))


@st.composite
def strange_requests(draw: st.DrawFn) -> Input:
    """Draw what may be no HTTP at all."""
    method = draw(st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "PUT", "PRI", "", "get"]))
    body = draw(st.binary(max_size=60) | values.map(lambda value: json.dumps(value).encode()))
    sizes = draw(st.lists(st.integers(1, 9), max_size=3).map(tuple))
    content = rendered(method, draw(targets), draw(headers), body, sizes)
    cuts = draw(st.lists(st.integers(1, 200), max_size=4).map(sorted).map(tuple))
    return Input(kind=Kind.BYTES, content=content, cuts=cuts)


@st.composite
def readers(draw: st.DrawFn) -> Input:
    """Draw the reader of a long stream."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": LONG}],
        "stream": True,
        "n": draw(st.integers(1, 3)),
        "evenflow": {"consumption_rate_tps": draw(st.sampled_from([10, 100, 1000]))},
    }
    if draw(st.booleans()):
        body |= {"logprobs": True, "top_logprobs": draw(st.integers(0, 20))}
    id = draw(st.sampled_from(["again", "and-again"]) | st.uuids().map(str))
    content = rendered(
        "POST", "/v1/chat/completions", {"x-request-id": id}, json.dumps(body).encode()
    )
    pauses_s = draw(st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.1, 1.0]), max_size=12).map(tuple))
    return Input(kind=Kind.READER, content=content, pauses_s=pauses_s)


def calls(kind: Kind, message: Any) -> st.SearchStrategy[Input]:
    """Draw messages of a gRPC call; half of them name the model, and some are no message."""
    known = messages_of(message.DESCRIPTOR, message_texts)
    named = known.map(lambda fields: fields | {"model": MODEL})
    encoded = (known | named).map(lambda fields: message(**fields).SerializeToString())
    return (encoded | st.binary(max_size=60)).map(lambda content: Input(kind=kind, content=content))


def described(path: str, mode: GenerationMode) -> st.SearchStrategy[Input]:
    """Draw requests from the document, or against it."""
    operation = schemathesis.openapi.from_dict(_DOCUMENT)[path]["POST"]

    def made(case: Any) -> Input:
        body = case.body if isinstance(case.body, dict | list | str | int | float) else None
        if isinstance(body, dict) and "model" in body:
            body = body | {"model": MODEL}
        return Input(
            kind=Kind.REQUEST, content=rendered("POST", path, {}, json.dumps(body).encode())
        )

    return operation.as_strategy(generation_mode=mode).map(made)


def strategies() -> list[st.SearchStrategy[Input]]:
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    return [
        requests(),
        strange_requests(),
        readers(),
        calls(Kind.GENERATE, pb.GenerateRequest),
        calls(Kind.CHAT, pb.ChatRequest),
        *(described(path, mode) for path in sorted(_BODIES) for mode in modes),
    ]


def drawn(strategy: st.SearchStrategy[Input], count: int, number: int) -> list[Input]:
    """Return up to `count` inputs of a strategy, others for each number."""
    inputs: list[Input] = []

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @seed(number)
    @given(strategy)
    def note(input: Input) -> None:
        inputs.append(input)

    note()
    return inputs


def mutants(base: Input, other: Input, source: random.Random) -> Iterator[Input]:
    """Yield changes of an HTTP request: bytes altered, cut out, doubled, and parts of another."""
    for _ in range(MUTANTS):
        content = bytearray(base.content)
        for _ in range(source.randint(1, 3)):
            at, end = sorted(source.randrange(len(content) + 1) for _ in range(2))
            match source.randrange(6):
                case 0 if content:
                    content[source.randrange(len(content))] = source.randrange(256)
                case 1:
                    del content[at : min(end, at + 8)]
                case 2:
                    content[at:at] = content[at : at + 16]
                case 3:
                    content[at:end] = other.content[at:end]
                case 4:
                    content[at:at] = source.choice(_PIECES)
                case 5:
                    del content[max(1, end) :]
        cuts = sorted(source.randrange(1, len(content) + 2) for _ in range(source.randrange(3)))
        yield replace(base, kind=Kind.BYTES, content=bytes(content), cuts=tuple(cuts))


_PIECES = (
    b"\r\n",
    b"\r\n\r\n",
    b"\0",
    b"\xff",
    b"0\r\n\r\n",
    b"content-length: 5\r\n",
    b"transfer-encoding: chunked\r\n",
    b"ffffffffffffffff\r\n",
    b"{",
    b"]",
    b'"',
    b"\\ud800",
    b"1e999",
    b"-",
)


def main(number: int) -> None:
    """Print batches for ever; in each round every strategy has its turn, and all are mixed."""
    source, all_strategies = random.Random(number), strategies()
    while True:
        inputs: list[Input] = []
        for strategy in all_strategies:
            number += 1
            drawn_now = drawn(strategy, ROUND, number)
            whole = [base for base in drawn_now if base.kind is Kind.REQUEST]
            inputs += drawn_now
            for base in whole:
                inputs += mutants(base, source.choice(whole), source)
        source.shuffle(inputs)
        for first in range(0, len(inputs), BATCH):
            batch = pickle.dumps(inputs[first : first + BATCH])
            print(base64.b64encode(batch).decode(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
