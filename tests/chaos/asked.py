"""Requests whose answers are known, and what clients read of them."""

import json
import random
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Protocol

import grpc
import httpx
from grpc import aio

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2 as pb_gateway
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_gateway_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from services.gateway.live.dispatcher import DRAINING_MESSAGE
from tests.fake_executor import MODEL
from tests.machine import token_at

AT_THE_DOOR = ("no executor is connected", DRAINING_MESSAGE)  # what a gateway says there
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
BREAKS_OFF = 0.05  # of all clients


class Door(Protocol):
    """A gateway, as its clients reach it."""

    @property
    def http(self) -> httpx.AsyncClient: ...

    @property
    def channel(self) -> aio.Channel: ...


class Asked:
    """One request, and what its answers must be."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.name = f"chaos-{number}"
        self.text = f"prompt {rng.randrange(1_000)}"
        self.seed = rng.randrange(1_000)
        self.num_tokens = rng.randrange(3, 40)
        self.path = rng.choice((TEXT, CHAT, "", ""))  # empty: over gRPC
        self.is_whole = rng.random() < 0.2
        self.has_tools = self.path == CHAT and rng.random() < 0.5
        self.num_answers = 3 if self.path and rng.random() < 0.15 else 1
        self.breaks_off_after = rng.randrange(1, 20) if rng.random() < BREAKS_OFF else None
        self.expected = self._expected()

    async def ask(self, door: Door) -> None:
        """Have it answered, and assert that nothing is lost, doubled or another's.

        Raises NotTakenError, EndedEarlyError, and BrokenOffError where the gateway is gone.
        """
        heard = Heard()
        try:
            await (self._over_http if self.path else self._over_grpc)(door, heard)
        except (BrokenOffError, httpx.TransportError):
            self._check_part(heard)
            raise BrokenOffError(heard.is_taken) from None
        if self.breaks_off_after is not None:
            self._check_part(heard)
        else:
            assert (heard.said, heard.ids) == (self.expected.said, self.expected.ids), self.name

    def _expected(self) -> "Heard":
        """Return all that there is to be heard."""
        expected = Heard()
        for index in range(self.num_answers):
            submit = pb.Submit(sampling=gen.SamplingParams(seed=self.seed + index))
            if self.path == CHAT:
                submit.chat.messages.add(role="user", content=self.text)
                if self.has_tools:
                    submit.chat.options.tools.add(name=TOOL["function"]["name"])
            else:
                submit.text = self.text
            for k in range(self.num_tokens):
                token = token_at(submit, k)
                expected.ids[index].append(token.id)
                expected.add(index, "content", token.text)
                expected.add(index, "reasoning", token.reasoning)
                for part in token.tool_calls:
                    expected.add(index, f"call {part.index}", part.name + part.arguments)
        return expected

    def _check_part(self, heard: "Heard") -> None:
        for place, text in heard.said.items():
            assert self.expected.said.get(place, "").startswith(text), (self.name, place)
        for index, ids in heard.ids.items():
            assert ids == self.expected.ids[index][: len(ids)], (self.name, index)

    def _has_enough(self, heard: "Heard") -> bool:
        num_heard = sum(map(len, heard.ids.values()))
        return self.breaks_off_after is not None and num_heard >= self.breaks_off_after

    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": MODEL,
            "seed": self.seed,
            "max_tokens": self.num_tokens,
            "n": self.num_answers,
            "stream": not self.is_whole,
            "return_token_ids": True,
        }
        if self.path == TEXT:
            return body | {"prompt": self.text}
        if self.has_tools:
            body["tools"] = [TOOL]
        return body | {"messages": [{"role": "user", "content": self.text}]}

    async def _over_http(self, door: Door, heard: "Heard") -> None:
        headers = {"x-request-id": self.name}
        async with door.http.stream("POST", self.path, json=self._body(), headers=headers) as got:
            heard.is_taken = got.status_code == httpx.codes.OK
            if not heard.is_taken or self.is_whole:
                heard.take(json.loads(await got.aread()))
                return
            async for line in got.aiter_lines():
                if line.startswith("data: {"):
                    heard.take(json.loads(line.removeprefix("data: ")))
                if self._has_enough(heard):
                    return

    async def _over_grpc(self, door: Door, heard: "Heard") -> None:
        sampling = gen.SamplingParams(seed=self.seed, max_tokens=self.num_tokens)
        request = pb_gateway.GenerateRequest(model=MODEL, text=self.text, sampling=sampling)
        stub = pb_gateway_grpc.GatewayServiceStub(door.channel)
        call = stub.Generate(request, metadata=[("x-request-id", self.name)])
        try:
            async for part in call:
                heard.is_taken = True
                heard.add(0, "content", "".join(token.text for token in part.tokens))
                heard.ids[0] += [token.id for token in part.tokens]
                if self._has_enough(heard):
                    call.cancel()
                    return
        except aio.AioRpcError as error:
            if "error-reason" not in dict(error.trailing_metadata() or ()):
                raise BrokenOffError(heard.is_taken) from None  # no gateway has said it
            raise error_of(error.details() or str(error.code())) from None
        assert await call.code() is grpc.StatusCode.OK


class Heard:
    """What a client has of the answers to a request."""

    def __init__(self) -> None:
        self.said: defaultdict[tuple[int, str], str] = defaultdict(str)  # by answer and place
        self.ids: defaultdict[int, list[int]] = defaultdict(list)  # by answer
        self.is_taken = False  # a gateway has begun to answer

    def add(self, index: int, place: str, text: str | None) -> None:
        if text:
            self.said[index, place] += text

    def take(self, told: dict[str, Any]) -> None:
        """Take in an event of HTTP, or a body."""
        if "error" in told:
            raise error_of(told["error"]["message"])
        for choice in told["choices"]:
            index = choice["index"]
            self.ids[index] += choice.get("token_ids") or []
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            self.add(index, "content", said.get("content"))
            self.add(index, "reasoning", said.get("reasoning"))
            for number, call in enumerate(said.get("tool_calls") or ()):
                function = call["function"]
                text = (function.get("name") or "") + function["arguments"]
                self.add(index, f"call {call.get('index', number)}", text)


def request_of(line: Mapping[str, Any]) -> str:
    """Return the name of the request that a line of a log is about."""
    return str(line["request_id"]).rpartition(":")[0].partition(".")[0]  # `NAME.1` is an answer's


class NotTakenError(Exception):
    """No executor was connected, or the gateway is leaving: it is asked again."""


class EndedEarlyError(Exception):
    """An answer ended with an error."""


class BrokenOffError(Exception):
    """The connection to the gateway is gone."""

    def __init__(self, was_taken: bool) -> None:
        super().__init__(f"the gateway {'had' if was_taken else 'had not'} begun to answer")
        self.was_taken = was_taken


def error_of(message: str) -> NotTakenError | EndedEarlyError:
    is_refused = any(reason in message for reason in AT_THE_DOOR)
    return NotTakenError(message) if is_refused else EndedEarlyError(message)
