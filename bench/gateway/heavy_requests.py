"""Requests that give a gateway and its executor seconds of work, sent side by side."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
from grpc import aio

from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as generation

ADDRESS = "127.0.0.1"  # that all of them come from; gRPC cannot be told another
TIMEOUT_S = 300.0
CHAT, COUNT = "/v1/chat/completions", "/tokenize"
MEGABYTE = "a b " * 256_000  # a token for every second character: more than the context has
SIXTEEN_MEGABYTES = "word " * 3_200_000  # just below what a message to the gateway may have
# Of two texts whose lengths are bounded: xgrammar takes seconds for such, at this vocabulary.
LEAST_LONGEST_TEXT = 100
_numbers = itertools.count()  # a form that was compiled before costs nothing


@dataclass(frozen=True, slots=True)
class Edge:
    """Where a gateway is reached, and under which id its model."""

    url: str
    grpc_address: str
    model: str

    def client(self, address: str) -> httpx.AsyncClient:
        """Return an HTTP client that calls from an `address` of this machine."""
        transport = httpx.AsyncHTTPTransport(local_address=address)
        return httpx.AsyncClient(base_url=self.url, transport=transport, timeout=TIMEOUT_S)

    def body(self, content: str, **options: object) -> dict[str, Any]:
        """Return a conversation of one turn whose answer, if any, has one token."""
        messages = [{"role": "user", "content": content}]
        return {"model": self.model, "messages": messages, "max_tokens": 1, **options}


def form_of(**properties: object) -> dict[str, Any]:
    """Return the `response_format` of an object that has these properties."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def small_form() -> dict[str, Any]:
    """Return a form with one boolean that was never asked for before."""
    return form_of(**{f"is_so_{next(_numbers)}": {"type": "boolean"}})


def slow_form() -> dict[str, Any]:
    """Return a form that takes seconds to compile and was never asked for before."""
    text = {"type": "string", "maxLength": LEAST_LONGEST_TEXT + next(_numbers) % 100}
    return form_of(**{f"{part}_{next(_numbers)}": text for part in ("title", "summary")})


async def chats(edge: Edge) -> Counter[str]:
    """Send 30 chats of 1 MB that the context has no room for; return how they were answered."""
    body = json.dumps(edge.body(MEGABYTE)).encode()
    return await _posted(edge, CHAT, [body] * 30)


async def counts(edge: Edge) -> Counter[str]:
    """Have the tokens of 15 chats of 1 MB counted."""
    chat = edge.body(MEGABYTE)
    del chat["max_tokens"]  # which is no part of the question
    body = json.dumps(chat).encode()
    return await _posted(edge, COUNT, [body] * 15)


async def forms(edge: Edge) -> Counter[str]:
    """Ask for 20 forms, all different, that take seconds to compile."""
    bodies = [edge.body("Hello.", response_format=slow_form()) for _ in range(20)]
    return await _posted(edge, CHAT, [json.dumps(body).encode() for body in bodies])


async def _posted(edge: Edge, path: str, bodies: list[bytes]) -> Counter[str]:
    headers = {"content-type": "application/json"}
    async with edge.client(ADDRESS) as client:
        posts = (client.post(path, content=body, headers=headers) for body in bodies)
        return Counter(str(answer.status_code) for answer in await asyncio.gather(*posts))


async def grpc_chats(edge: Edge) -> Counter[str]:
    """Send 4 chats of 16 MB by gRPC."""
    turn = generation.ChatMessage(role="user", content=SIXTEEN_MEGABYTES)
    request = pb.ChatRequest(model=edge.model, messages=[turn])
    request.sampling.max_tokens = 1
    async with aio.insecure_channel(edge.grpc_address) as channel:
        stub = pb_grpc.GatewayServiceStub(channel)
        return Counter(await asyncio.gather(*(_chatted(stub, request) for _ in range(4))))


async def _chatted(stub: Any, request: pb.ChatRequest) -> str:
    try:
        async for _ in stub.Chat(request, timeout=TIMEOUT_S):
            pass
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


Send = Callable[[Edge], Coroutine[Any, Any, Counter[str]]]
