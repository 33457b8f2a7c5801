"""Requests whose answers are known, and what clients read of them."""

import json
import random
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
BREAKS_OFF = 0.05  # of all clients


class Door(Protocol):
    """A gateway, as its clients reach it."""

    @property
    def http(self) -> httpx.AsyncClient: ...

    @property
    def channel(self) -> aio.Channel: ...


class Asked:
    """One request, and what its answer must be."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.name = f"chaos-{number}"
        self.text = f"prompt {rng.randrange(1_000)}"
        self.seed = rng.randrange(1_000)
        self.num_tokens = rng.randrange(3, 40)  # three are of thoughts
        self.is_whole = rng.random() < 0.2
        self.is_over_grpc = rng.random() < 0.3
        self.breaks_off_after = rng.randrange(1, 20) if rng.random() < BREAKS_OFF else None
        sampling = gen.SamplingParams(seed=self.seed)
        submit = pb.Submit(text=self.text, sampling=sampling)
        tokens = [token_at(submit, k) for k in range(self.num_tokens)]
        self.expected = "".join(token.text for token in tokens)
        self.expected_ids = [token.id for token in tokens]

    async def ask(self, door: Door) -> None:
        """Have it answered, and assert that nothing is lost, doubled or another's.

        Raises NotTakenError, EndedEarlyError, and BrokenOffError where the gateway is gone.
        """
        heard = Heard()
        try:
            await (self._over_grpc if self.is_over_grpc else self._over_http)(door, heard)
        except (BrokenOffError, httpx.TransportError):
            self._check_part(heard)
            raise BrokenOffError(heard.is_taken) from None
        if self.breaks_off_after is not None:
            self._check_part(heard)
        else:
            assert (heard.text, heard.ids) == (self.expected, self.expected_ids), self.name

    def _check_part(self, heard: "Heard") -> None:
        assert self.expected.startswith(heard.text), self.name
        assert heard.ids == self.expected_ids[: len(heard.ids)], self.name

    def _has_enough(self, heard: "Heard") -> bool:
        return self.breaks_off_after is not None and len(heard.ids) >= self.breaks_off_after

    async def _over_http(self, door: Door, heard: "Heard") -> None:
        body = {
            "model": MODEL,
            "prompt": self.text,
            "seed": self.seed,
            "max_tokens": self.num_tokens,
            "stream": not self.is_whole,
            "return_token_ids": True,
        }
        headers = {"x-request-id": self.name}
        async with door.http.stream("POST", "/v1/completions", json=body, headers=headers) as got:
            heard.is_taken = got.status_code == httpx.codes.OK
            if not heard.is_taken or self.is_whole:
                heard.add(json.loads(await got.aread()))
                return
            async for line in got.aiter_lines():
                if line.startswith("data: {"):
                    heard.add(json.loads(line.removeprefix("data: ")))
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
                heard.text += "".join(token.text for token in part.tokens)
                heard.ids += [token.id for token in part.tokens]
                if self._has_enough(heard):
                    call.cancel()
                    return
        except aio.AioRpcError as error:
            if "error-reason" not in dict(error.trailing_metadata() or ()):
                raise BrokenOffError(heard.is_taken) from None  # no gateway has said it
            raise error_of(error.details() or str(error.code())) from None
        assert await call.code() is grpc.StatusCode.OK


class Heard:
    """What a client has of an answer."""

    def __init__(self) -> None:
        self.text = ""
        self.ids = list[int]()
        self.is_taken = False  # a gateway has begun to answer

    def add(self, said: dict[str, Any]) -> None:
        """Take in an event of HTTP, or a body."""
        if "error" in said:
            raise error_of(said["error"]["message"])
        for choice in said["choices"]:
            self.text += choice["text"]
            self.ids += choice.get("token_ids") or []


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
