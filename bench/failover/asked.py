"""The requests of one load, over all public forms, and what their readers got."""

import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import grpc
import httpx
from google.protobuf.json_format import MessageToDict
from grpc import aio

from bench.gateway.heavy_requests import Edge
from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from lab.thinking_model import END_OF_THOUGHT

RATE_TPS = 12.0
THOUGHTS_BIAS = 3.5  # of the logit of the mark that ends them: after some tens of tokens
NUM_TOKENS = 300  # of an answer
TIMEOUT_S = 600.0
PACE = {"evenflow": {"consumption_rate_tps": RATE_TPS, "pace_tail": True}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ADAPTER = "tuned"  # what its requests name as the model
MARK = "evenflow-failover"  # the beginning of every request's name
SCHEMA = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": {"type": "string"}, "minItems": 60}},
    "required": ["words"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "array", "items": {"type": "string"}, "minItems": 40}},
            "required": ["at"],
        },
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request."""

    name: str
    path: str  # of HTTP; empty: over gRPC
    body: dict[str, Any]
    # Its client breaks its connections behind so many events, one after the other, and comes back:
    # of what is resumable over HTTP.
    breaks: Sequence[int] = ()


@dataclass(slots=True)
class Got:
    """What a reader has of an answer."""

    said: dict[str, str] = field(default_factory=lambda: defaultdict(str))  # joined, by place
    arrived_s: list[float] = field(default_factory=list)  # of each event that says something
    error: str = ""
    is_taken: bool = False  # a gateway has begun to answer
    is_broken_off: bool = False  # the connection has ended, and no gateway has said why
    is_gone: bool = False  # its client came back, and the stream could not be taken up

    def as_it_was(self) -> "Got":
        """Return what is here, as of a request that is yet to be sent again."""
        return Got(said=defaultdict(str, self.said), arrived_s=[*self.arrived_s])

    def add(self, place: str, text: str) -> None:
        self.said[place] += text

    def begins(self, whole: "Got") -> bool:
        """Say whether all that is here is the beginning of an answer."""
        return all(whole.said.get(place, "").startswith(text) for place, text in self.said.items())

    @property
    def longest_gap_s(self) -> float:
        return longest_gap_s(self.arrived_s)

    def longest_gap_since_s(self, at_s: float) -> float:
        """Return the longest one that ended after an instant of the clock."""
        before = [one for one in self.arrived_s if one <= at_s][-1:]
        return longest_gap_s([*before, *(one for one in self.arrived_s if one > at_s)])


def longest_gap_s(arrived_s: Sequence[float]) -> float:
    """Return the longest time between two arrivals, in their order."""
    return max((after - before for before, after in pairwise(arrived_s)), default=0.0)


def load(model: str, *, num_tokens: int = NUM_TOKENS) -> list[Asked]:
    """Return 22 requests: greedy, seeded, penalties, forms, tools, thoughts, an adapter, stop
    strings, probabilities.

    One ends at a stop string, and two think first, one of them before a form.
    """
    chat = {"temperature": 0}
    hot = {"temperature": 1.0, "top_p": 0.9}
    regex = {"structured_outputs": {"regex": "([a-z]{3} ){200}"}}
    form = {"response_format": {"type": "json_schema", "json_schema": _named(SCHEMA)}}
    calls = {"tools": [TOOL], "tool_choice": "required"}
    likely = {"logprobs": True, "top_logprobs": 2}
    ends = {"stop": ["e", "a"], "min_tokens": 2 * num_tokens // 3}  # soon behind so many
    thinks = {
        "temperature": 1.0,
        "reasoning_effort": "low",
        "logit_bias": {str(END_OF_THOUGHT): THOUGHTS_BIAS},
    }
    options: list[tuple[str, str, dict[str, Any]]] = [
        (CHAT, "greedy", chat),
        (CHAT, "seeded", {**hot, "seed": 0}),
        (CHAT, "thoughts", {"seed": 1, **thinks}),
        (CHAT, "adapter", {**hot, "seed": 2, "model": ADAPTER}),
        (CHAT, "presence", {**hot, "seed": 7, "presence_penalty": 0.8}),
        (CHAT, "repetition", {**chat, "repetition_penalty": 1.2, "frequency_penalty": 0.4}),
        (CHAT, "regex", {**hot, "seed": 3, **regex}),
        (TEXT, "regex-text", {**chat, **regex}),
        (CHAT, "schema", {**chat, **form}),
        (CHAT, "schema-thoughts", {"seed": 5, **form, **thinks}),
        (CHAT, "tools", {**hot, "seed": 6, **calls}),
        (CHAT, "tools-greedy", {**chat, **calls}),
        (CHAT, "likely", {**chat, **likely}),
        (TEXT, "likely-text", {**hot, "seed": 8, "logprobs": 2}),
        (TEXT, "stop", {**hot, "seed": 9, "stop": ["never said \u2603"], "min_tokens": 20}),
        (CHAT, "stop-that-comes", {**hot, "seed": 13, **ends}),
        (CHAT, "three", {**hot, "seed": 10, "n": 3}),
        (RESPONSES, "responses", {"temperature": 0}),
        (MESSAGES, "messages", {"temperature": 0}),
        ("", "grpc-greedy", {"temperature": 0.0}),
        ("", "grpc-seeded", {"temperature": 1.0, "seed": 11}),
        ("", "grpc-likely", {"temperature": 1.0, "seed": 12, "logprobs": 2}),
    ]
    return [
        Asked(name=name, path=path, body=_body(path, name, model, num_tokens, more))
        for path, name, more in options
    ]


def _named(schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": "answer", "schema": schema}


def _body(
    path: str, name: str, model: str, num_tokens: int, more: dict[str, Any]
) -> dict[str, Any]:
    said = f"Tell of {name}, and of what was there before it."
    messages = [{"role": "user", "content": said}]
    if not path:
        return {"text": said, "max_tokens": num_tokens, "ignore_eos": True, **more}
    body: dict[str, Any] = {"model": model, "stream": True, **PACE, **more}
    if path == RESPONSES:
        return body | {"input": said, "max_output_tokens": num_tokens}
    if path == MESSAGES:
        return body | {"messages": messages, "max_tokens": num_tokens}
    body |= {"max_tokens": num_tokens, "return_token_ids": True}
    if not any(form in more for form in ("response_format", "structured_outputs", "tools")):
        body["ignore_eos"] = True
    return body | ({"prompt": said} if path == TEXT else {"messages": messages})


async def ask(edge: Edge, asked: Asked, got: Got | None = None) -> Got:
    """Have one request answered; `got`: what its reader has of it already."""
    got = Got() if got is None else got
    parts = _over_grpc(edge, asked) if not asked.path else _over_http(edge, asked)
    try:
        async for said in parts:
            got.is_taken = True
            for place, text in said:
                got.add(place, text)
            if said:
                got.arrived_s.append(time.time())
    except _GoneError as error:
        got.error, got.is_gone = f"{error}: {error.__cause__}", True
    except (httpx.HTTPError, aio.AioRpcError, ValueError) as error:
        got.error = f"{type(error).__name__}: {error}"
        got.is_broken_off = isinstance(error, httpx.TransportError) or (
            isinstance(error, aio.AioRpcError)
            and "error-reason" not in dict(error.trailing_metadata() or ())
        )
    return got


async def ask_all(edge: Edge, load: list[Asked]) -> dict[str, Got]:
    """Have a load answered side by side."""
    answers = await asyncio.gather(*(ask(edge, asked) for asked in load))
    return {asked.name: got for asked, got in zip(load, answers, strict=True)}


Said = list[tuple[str, str]]


class _GoneError(Exception):
    """A client came back to a stream, and did not get on with it. What went wrong is the cause."""


async def _over_http(edge: Edge, asked: Asked) -> AsyncIterator[Said]:
    name, last = f"{MARK}-{asked.name}", ""
    async with httpx.AsyncClient(base_url=edge.url, timeout=TIMEOUT_S) as client:
        for most in (*asked.breaks, sys.maxsize):
            comes_back = bool(last)
            if comes_back:
                headers = {"last-event-id": last}
                request = client.stream("GET", f"/v1/streams/{name}", headers=headers)
            else:
                headers = {"x-request-id": name}
                request = client.stream("POST", asked.path, json=asked.body, headers=headers)
            num_events = 0
            try:
                async with aclosing(_events(request)) as events:
                    async for id, said in events:
                        last = id or last
                        yield said
                        num_events += bool(id)
                        if num_events == most:
                            break
                    else:
                        return
            except (httpx.HTTPError, _RefusedError) as error:
                if comes_back:
                    raise _GoneError("it came back") from error
                raise


class _RefusedError(ValueError):
    """A gateway has said no."""


async def _events(
    request: AbstractAsyncContextManager[httpx.Response],
) -> AsyncGenerator[tuple[str, Said], None]:
    """Yield what each event says, with its id if it has one; at first nothing."""
    id = ""
    async with request as answer:
        if answer.status_code == httpx.codes.NO_CONTENT:
            return
        if answer.status_code != httpx.codes.OK:
            raise _RefusedError((await answer.aread()).decode())
        yield "", []
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                id = line.removeprefix("id: ")
            elif line.startswith("data: {"):
                yield id, _said(json.loads(line.removeprefix("data: ")))


def _said(event: dict[str, Any]) -> Said:
    """Return what an event says, by the place in the answer; names of calls that are drawn are not
    looked at.
    """
    if "error" in event or event.get("type") in ("error", "response.failed"):
        raise ValueError(json.dumps(event))
    said: Said = []
    for choice in event.get("choices", ()):
        said += [(f"{choice['index']} {place}", text) for place, text in _of_choice(choice)]
    match event.get("type"):
        case "response.output_text.delta":
            said.append(("text", event["delta"]))
        case "response.completed":
            response = event["response"]
            said.append(("end", json.dumps([response["status"], _counts(response["usage"])])))
        case "content_block_delta":
            said.append(("text", json.dumps(event["delta"])))
        case "message_delta":
            usage = event["usage"]  # input tokens are those that were not cached
            read = sum(one or 0 for name, one in usage.items() if name.endswith("input_tokens"))
            said.append(("end", json.dumps([event["delta"], read, usage["output_tokens"]])))
    return said


def _of_choice(choice: dict[str, Any]) -> Said:
    delta = choice.get("delta") or {}
    said: Said = [
        (place, text)
        for place in ("content", "reasoning", "reasoning_content")
        if (text := delta.get(place))
    ]
    if text := choice.get("text"):
        said.append(("content", text))
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        said.append((f"call {call['index']}", function.get("name") or ""))
        said.append((f"call {call['index']}", function.get("arguments") or ""))
    if ids := choice.get("token_ids"):
        said.append(("ids", "".join(f"{id} " for id in ids)))
    if logprobs := choice.get("logprobs"):
        said.append(("logprobs", _rounded(logprobs)))
    if reason := choice.get("finish_reason"):
        said.append(("end", reason))
    return said


def _rounded(logprobs: dict[str, Any]) -> str:
    """Return probabilities without where they stand in the text, and what batches round."""
    rest = {name: one for name, one in logprobs.items() if name != "text_offset"}
    return json.dumps(json.loads(json.dumps(rest), parse_float=lambda one: round(float(one), 3)))


def _counts(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the counts of tokens, but not of cached ones, which depend on earlier requests."""
    return {
        name: one
        for name, one in usage.items()
        if name.lower().endswith("tokens") and "cache" not in name.lower()
    }


async def _over_grpc(edge: Edge, asked: Asked) -> AsyncIterator[Said]:
    fields = dict(asked.body)
    resume = fields.pop("resume", None)
    request = pb.GenerateRequest(model=edge.model, text=fields.pop("text"), resume=resume)
    request.sampling.CopyFrom(gen.SamplingParams(**fields))
    request.service_level.consumption_rate_tps = RATE_TPS
    request.service_level.pace_tail = True
    async with aio.insecure_channel(edge.grpc_address) as channel:
        stub = pb_grpc.GatewayServiceStub(channel)
        metadata = [("x-request-id", f"{MARK}-{asked.name}")]
        call = stub.Generate(request, metadata=metadata, timeout=TIMEOUT_S)
        async for part in call:
            said: Said = []
            for token in part.tokens:
                said += [("ids", f"{token.id} "), ("content", token.text)]
                if token.HasField("logprobs"):
                    said.append(("logprobs", _rounded(MessageToDict(token.logprobs))))
            if part.HasField("finish"):
                usage = _counts(MessageToDict(part.finish.usage))
                said.append(("end", f"{part.finish.reason} {json.dumps(usage)}"))
            yield said
        assert await call.code() is grpc.StatusCode.OK
