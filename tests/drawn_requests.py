"""Requests with options drawn at random, over both edges, each abandoned at a drawn moment."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from google.protobuf import json_format
from grpc import aio

from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from lab.stack.processes import MODEL, Stack

PARAMETERS = {"type": "object", "properties": {"u": {"enum": ["C", "F"]}}, "required": ["u"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
FORMS: list[dict[str, Any]] = [
    {"choice": ["yes", "no"]},
    {"regex": "(ab){200}"},
    {"json": {"type": "array", "items": {"type": "integer"}}},
]


class Moment(Enum):
    """When a client goes away."""

    SENT = "as soon as it has sent its request"
    ENTERED = "when the engine has it"
    GENERATING = "when some tokens exist"
    DEADLINE = "after a time that it drew"  # over gRPC only


class Edge(Enum):
    COMPLETION = "/v1/completions"
    CHAT = "/v1/chat/completions"
    GENERATE = "Generate"
    CHAT_CALL = "Chat"

    @property
    def is_grpc(self) -> bool:
        return self in (Edge.GENERATE, Edge.CHAT_CALL)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One request. `body` is JSON, of the protobuf message over gRPC."""

    name: str
    edge: Edge
    body: dict[str, Any]
    moment: Moment
    deadline_s: float


def draw(rng: random.Random, name: str) -> Drawn:
    edge = rng.choice(list(Edge))
    moments = list(Moment) if edge.is_grpc else list(Moment)[:-1]
    text = "word " * rng.choice([1, 40, 1_500, 3_500])  # a word is two tokens: up to four pieces
    body = _grpc_body(rng, edge, text) if edge.is_grpc else _http_body(rng, edge, text)
    return Drawn(
        name=name,
        edge=edge,
        body={"model": MODEL, **body},
        moment=rng.choice(moments),
        deadline_s=rng.uniform(0.1, 2.0),
    )


def _http_body(rng: random.Random, edge: Edge, text: str) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": 400, "stream": rng.random() < 0.7}
    options: list[dict[str, Any]] = [
        {"n": 3},
        {"stop": ["zq", "\n\n"]},
        {"seed": 7},
        {"ignore_eos": True},
        {"evenflow": {"consumption_rate_tps": 20.0}},
    ]
    if edge is Edge.COMPLETION:
        body |= {"prompt": text}
        options += [{"echo": True}, {"echo": True, "logprobs": 1}, {"logprobs": 2}]
    else:
        body |= {"messages": [{"role": "user", "content": text}]}
        options += [{"logprobs": True, "top_logprobs": 2}]
    for option in rng.sample(options, rng.randint(0, 4)):
        body |= option
    shape = rng.random()
    if shape < 0.2:
        body |= {"structured_outputs": rng.choice(FORMS)}
    elif shape < 0.4 and edge is Edge.CHAT:
        body |= {"tools": [TOOL], "tool_choice": rng.choice(["auto", "required"])}
    return body


def _grpc_body(rng: random.Random, edge: Edge, text: str) -> dict[str, Any]:
    sampling: dict[str, Any] = {"max_tokens": 400}
    options: list[dict[str, Any]] = [
        {"stop": ["zq", "\n\n"]},
        {"seed": 7},
        {"ignore_eos": True},
        {"logprobs": 2},
        {"structured_outputs": {"regex": "(ab){200}"}},
    ]
    for option in rng.sample(options, rng.randint(0, 4)):
        sampling |= option
    if edge is Edge.CHAT_CALL:
        return {"sampling": sampling, "messages": [{"role": "user", "content": text}]}
    return {"sampling": sampling, "text": text, "echo": rng.random() < 0.5}


Waiting: TypeAlias = Callable[[Drawn], Awaitable[None]]


async def abandon(stack: Stack, drawn: Drawn, reached: Waiting) -> None:
    """Send a request, and go away when `reached` returns, or when it has ended before that."""
    await (_call if drawn.edge.is_grpc else _post)(stack, drawn, reached)


async def _post(stack: Stack, drawn: Drawn, reached: Waiting) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.ports["http"])
    body = json.dumps(drawn.body).encode()
    head = (
        f"POST {drawn.edge.value} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"x-request-id: {drawn.name}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    await _first(reader.read(), reached(drawn))
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def _call(stack: Stack, drawn: Drawn, reached: Waiting) -> None:
    async with aio.insecure_channel(stack.address("gateway")) as channel:
        stub = pb_grpc.GatewayServiceStub(channel)
        is_chat = drawn.edge is Edge.CHAT_CALL
        request = json_format.ParseDict(
            drawn.body, pb.ChatRequest() if is_chat else pb.GenerateRequest()
        )
        call = (stub.Chat if is_chat else stub.Generate)(
            request,
            timeout=drawn.deadline_s if drawn.moment is Moment.DEADLINE else None,
            metadata=(("x-request-id", drawn.name),),
        )
        await _first(_read(call), reached(drawn))
        call.cancel()


async def _read(call: Any) -> None:
    with suppress(aio.AioRpcError):
        async for _ in call:
            pass


async def _first(*awaitables: Awaitable[object]) -> None:
    """Wait for one, and give up the other."""
    tasks = [asyncio.ensure_future(one) for one in awaitables]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
