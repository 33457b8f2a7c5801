"""Streaming clients that write down what they got and when, for end-to-end tests."""

import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
from grpc import aio

from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from evenflow.tracker.v1 import tracker_pb2 as tracker_pb
from evenflow.tracker.v1 import tracker_pb2_grpc as tracker_grpc
from lab.stack.processes import MODEL, RPC_TIMEOUT_S, Stack
from services.kit.rpc import name_of_request

CLIENT_TIMEOUT_S = 1_800.0
EXECUTOR_ID = socket.gethostname()  # as it is by default


@dataclass(kw_only=True)
class Received:
    """One answer as its client saw it."""

    request_id: str = ""
    text: str = ""
    token_indices: list[int] = field(default_factory=list)  # gRPC only
    token_ids: list[int] = field(default_factory=list)  # gRPC only
    sent_s: float = 0.0  # monotonic: before the request
    arrived_s: list[float] = field(default_factory=list)  # one per message with text, monotonic
    finish_reason: str | None = None
    num_output_tokens: int | None = None  # as the server counted
    status: int | None = None  # HTTP only
    errors: list[dict[str, Any]] = field(default_factory=list)  # SSE error events
    done: bool = False  # HTTP only: `[DONE]` came


def chat_body(prompt: str, *, max_tokens: int, **extra: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        **extra,
    }


async def http_chat(
    base_url: str,
    prompt: str,
    *,
    max_tokens: int,
    request_id: str,
    rate_tps: float | None = None,
    got: Received | None = None,
) -> Received:
    """Stream one chat answer over HTTP, to its last token at `rate_tps` if that is given.

    It is in `got` as it comes. An error status or event is recorded, not raised.
    """
    got = got or Received()
    got.request_id, got.sent_s = request_id, time.monotonic()
    headers = {"x-request-id": request_id}
    body = chat_body(
        prompt, max_tokens=max_tokens, stream=True, stream_options={"include_usage": True}
    )
    if rate_tps is not None:
        body["evenflow"] = {"consumption_rate_tps": rate_tps, "pace_tail": True}
    async with (
        httpx.AsyncClient(timeout=CLIENT_TIMEOUT_S) as client,
        client.stream(
            "POST", f"{base_url}/v1/chat/completions", json=body, headers=headers
        ) as answer,
    ):
        got.status = answer.status_code
        if answer.status_code != 200:
            got.errors.append(json.loads(await answer.aread())["error"])
            return got
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                _take_event(got, line.removeprefix("data: "))
    return got


def _take_event(got: Received, data: str) -> None:
    if data == "[DONE]":
        got.done = True
        return
    event = json.loads(data)
    if "error" in event:
        got.errors.append(event["error"])
        return
    if event.get("usage"):
        got.num_output_tokens = event["usage"]["completion_tokens"]
    for choice in event["choices"]:
        if text := choice["delta"].get("content"):
            got.text += text
            got.arrived_s.append(time.monotonic())
        got.finish_reason = choice["finish_reason"] or got.finish_reason


async def grpc_chat(
    address: str,
    prompt: str,
    *,
    max_tokens: int,
    request_id: str,
    rate_tps: float | None = None,
    got: Received | None = None,
) -> Received:
    """Stream one chat answer over gRPC, to its last token at `rate_tps` if that is given.

    It is in `got` as it comes. Raises grpc.aio.AioRpcError when the call fails.
    """
    got = got or Received()
    got.request_id, got.sent_s = request_id, time.monotonic()
    level = gen.ServiceLevel()
    if rate_tps is not None:
        level = gen.ServiceLevel(consumption_rate_tps=rate_tps, pace_tail=True)
    request = pb.ChatRequest(
        model=MODEL,
        messages=[gen.ChatMessage(role="user", content=prompt)],
        sampling=gen.SamplingParams(max_tokens=max_tokens, temperature=0),
        service_level=level,
    )
    async with aio.insecure_channel(address) as channel:
        call = pb_grpc.GatewayServiceStub(channel).Chat(
            request, timeout=CLIENT_TIMEOUT_S, metadata=(("x-request-id", request_id),)
        )
        async for response in call:
            for token in response.tokens:
                got.token_indices.append(token.index)
                got.token_ids.append(token.id)
                got.text += token.text
                got.arrived_s.append(time.monotonic())
            if response.HasField("finish"):
                got.finish_reason = gen.FinishReason.Name(response.finish.reason)
                got.num_output_tokens = response.finish.usage.num_output_tokens
    return got


def recorded(stack: Stack) -> dict[str, tracker_pb.RequestRecord]:
    """Return the tracker's records by the clients' ids; none while it is away."""
    with grpc.insecure_channel(stack.address("tracker")) as channel:
        try:
            answer = tracker_grpc.TrackerServiceStub(channel).Snapshot(
                tracker_pb.SnapshotRequest(executor_id=EXECUTOR_ID), timeout=RPC_TIMEOUT_S
            )
        except grpc.RpcError:
            return {}
    return {name_of_request(record.request_id): record for record in answer.requests}
