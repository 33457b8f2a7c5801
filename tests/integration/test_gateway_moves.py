"""Answers that outlive their executor: each is what it would have been, and nobody hears of it.

The fakes' k-th token is a function of prompt, seed and k, so that any splice shows.
"""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b

import grpc
import httpx
import pytest

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2 as pb_gateway
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_gateway_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from services.kit.rpc import name_of_request
from tests.fake_executor import FINGERPRINT, MODEL, PROMPT_DIGEST, FakeExecutor, Script, open_gate
from tests.gateways import Client, chat_body, gateway_for, stream_body, until

NUM_TOKENS = 24  # of an answer whose request does not say
CHAT = "/v1/chat/completions"
WORDS = ["é", "a", " lot", "of", "\n", "words", "."]


def token_at(submit: pb.Submit, k: int) -> pb.Token:
    """Return the k-th token of an answer: a thought, half a character, text, or part of a call."""
    said = submit.text or str(submit.token_ids.ids) or submit.chat.messages[-1].content
    drawn = blake2b(f"{said}|{submit.sampling.seed}|{k}".encode()).digest()
    word = WORDS[drawn[0] % len(WORDS)]
    token = pb.Token(id=int.from_bytes(drawn[1:4], "big"))
    if submit.chat.options.tools and k >= NUM_TOKENS // 3:
        part = gen.ToolCallPart(arguments=f"{k}")
        if k % 8 == 0:
            part.id, part.name = f"call-{k}", "look"
        part.index = k // 8 - 1
        token.tool_calls.append(part)
    elif submit.HasField("chat") and k < 3:
        token.reasoning = word
    else:
        token.text = "" if drawn[4] % 5 == 0 else word
    return token


class Machine(FakeExecutor):
    """Stops midway in each answer while `goes_on` is not set."""

    def __init__(self, number: int = 0, **facts: str) -> None:
        facts = {"fingerprint": FINGERPRINT, "numerics": "cpu"} | facts
        super().__init__(executor_id=f"executor-{number}", **facts)
        self.goes_on = open_gate()
        self.takes = open_gate()
        self.wrong: list[pb.Submit] = []  # those that go on with tokens of another answer
        self.script_for = self._script_for

    def _script_for(self, submit: pb.Submit) -> Script:
        num_tokens = submit.sampling.max_tokens or NUM_TOKENS
        tokens = [token_at(submit, k) for k in range(num_tokens)]
        ids = list(submit.resume.output_ids)
        if ids != [token.id for token in tokens[: len(ids)]]:
            self.wrong.append(submit)
        return Script(
            texts=tokens,
            midway=self.goes_on,
            accepting=self.takes,
            num_reasoning_tokens=3,
            finish_reason=gen.FINISH_REASON_LENGTH,
        )

    @property
    def resumed(self) -> list[pb.Submit]:
        return [submit for submit in self.submits if submit.HasField("resume")]

    @property
    def begun(self) -> list[pb.Submit]:
        return [submit for submit in self.submits if not submit.HasField("resume")]


@asynccontextmanager
async def running(*machines: Machine, **overrides: object) -> AsyncIterator[Client]:
    for machine in machines:
        await machine.start()
    async with gateway_for(*machines, **overrides) as client:
        await until(lambda: all(machine.session for machine in machines))
        await client.wait_ready()
        yield client
    for machine in machines:
        await machine.kill()
        assert machine.wrong == []


Ask = Callable[[Client], Awaitable[str]]


def over_http(name: str, path: str, body: dict[str, object]) -> Ask:
    async def ask(client: Client) -> str:
        answer = await client.http.post(path, json=body, headers={"x-request-id": name})
        assert answer.status_code == 200, answer.text
        events = re.sub(r'("created\w*"):\d+', r"\1:0", answer.text).split("\n\n")
        return "\n\n".join(sorted(events, key=choice_of))

    return ask


def choice_of(event: str) -> int:
    """Return the choice that an event is of: those of several answers come as they may."""
    found = re.search(r'"choices":\[\{"index":(\d+)', event)
    return int(found.group(1)) if found else sys.maxsize


def over_grpc(name: str, request: pb_gateway.GenerateRequest | pb_gateway.ChatRequest) -> Ask:
    async def ask(client: Client) -> str:
        stub = pb_gateway_grpc.GatewayServiceStub(client.channel)
        is_chat = isinstance(request, pb_gateway.ChatRequest)
        call = (stub.Chat if is_chat else stub.Generate)(request, metadata=[("x-request-id", name)])
        parts = [part async for part in call]
        parts[-1].finish.moves = 0
        whole = type(parts[0])()
        for part in parts:  # messages are as long as the loop has it
            whole.MergeFrom(part)
        return str(whole)

    return ask


def asks() -> list[Ask]:
    """Return requests of all forms, twice, so that two executors have each."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    message = gen.ChatMessage(role="user", content="Say hello over gRPC.")
    sampling = gen.SamplingParams(seed=3, logprobs=2, max_tokens=NUM_TOKENS)
    likely = {"logprobs": True, "top_logprobs": 2, "seed": 5}
    turns = chat_body()["messages"]
    kinds: list[Callable[[str], Ask]] = [
        lambda name: over_http(name, CHAT, stream_body(**likely)),
        lambda name: over_http(name, CHAT, stream_body(n=3, seed=1)),
        lambda name: over_http(name, CHAT, chat_body(n=2, seed=1, **{"logprobs": True})),
        lambda name: over_http(name, CHAT, stream_body(tools=[tool], return_token_ids=True)),
        lambda name: over_http(name, CHAT, chat_body(tools=[tool])),
        lambda name: over_http(
            name,
            CHAT,
            stream_body(stream_options={"include_usage": True, "continuous_usage_stats": True}),
        ),
        lambda name: over_http(
            name,
            "/v1/completions",
            {
                "model": MODEL,
                "prompt": ["Once", "Twice"],
                "stream": True,
                "echo": True,
                "logprobs": 1,
                "max_tokens": NUM_TOKENS,
            },
        ),
        lambda name: over_http(
            name,
            "/v1/responses",
            {"model": MODEL, "input": "Say hello.", "stream": True},
        ),
        lambda name: over_http(
            name,
            "/v1/messages",
            {"model": MODEL, "messages": turns, "stream": True, "max_tokens": NUM_TOKENS},
        ),
        lambda name: over_http(
            name, "/v1/messages", {"model": MODEL, "messages": turns, "max_tokens": NUM_TOKENS}
        ),
        lambda name: over_grpc(
            name,
            pb_gateway.GenerateRequest(
                model=MODEL, text="Once", sampling=sampling, echo=True, returns_prompt_ids=True
            ),
        ),
        lambda name: over_grpc(name, pb_gateway.ChatRequest(model=MODEL, messages=[message])),
    ]
    return [kind(f"{k}-{time}") for time in "ab" for k, kind in enumerate(kinds)]


async def undisturbed() -> list[str]:
    async with running(Machine()) as client:
        return list(await asyncio.gather(*(ask(client) for ask in asks())))


def all_are_midway(client: Client, num_answers: int) -> bool:
    """Say whether so many answers are live, and each has half of its tokens."""
    return client.num_generated() == [NUM_TOKENS // 2] * num_answers


async def half_way(machine: Machine, client: Client) -> list["asyncio.Task[str]"]:
    """Ask for everything; return when what `machine` has is half there, and all else is over."""
    machine.goes_on.clear()
    answers = [asyncio.create_task(ask(client)) for ask in asks()]
    await until(lambda: sum(answer.done() for answer in answers) >= len(answers) // 4)
    await until(lambda: set(client.num_generated()) == {NUM_TOKENS // 2})
    return answers


@pytest.mark.logs("request_moved")
async def test_each_answer_is_what_it_would_have_been() -> None:
    expected = await undisturbed()
    first, second = Machine(0), Machine(1)
    async with running(first, second) as client:
        answers = await half_way(first, client)

        await first.kill()

        assert list(await asyncio.gather(*answers)) == expected
    assert len(second.resumed) > len(answers) // 4
    for submit in second.resumed:
        resume = submit.resume
        (before,) = (one for one in first.submits if one.request_id == submit.request_id)
        assert len(resume.output_ids) == resume.num_delivered_tokens == NUM_TOKENS // 2
        assert resume.prompt_digest == PROMPT_DIGEST
        assert resume.max_tokens >= NUM_TOKENS
        assert 0 <= resume.last_due_age_s <= resume.arrived_age_s < 60
        assert submit.generation > before.generation
        assert submit.rendered_at_s == before.rendered_at_s > 0
        assert len(submit.further_answers) == 0


async def test_a_lone_executor_that_comes_back_goes_on_with_its_answers() -> None:
    expected = await undisturbed()
    only = Machine()
    async with running(only) as client:
        only.goes_on.clear()
        answers = [asyncio.create_task(ask(client)) for ask in asks()]
        await until(lambda: set(client.num_generated()) == {NUM_TOKENS // 2})

        await only.kill()
        await until(lambda: not client.gateway.dispatcher.is_ready)
        only.goes_on.set()
        await only.start()

        assert list(await asyncio.gather(*answers)) == expected
    assert only.resumed


async def test_what_has_not_begun_begins_again() -> None:
    expected = await undisturbed()
    first, second = Machine(0, fingerprint=""), Machine(1, fingerprint="")
    async with running(first, second) as client:
        first.takes.clear()
        answers = [asyncio.create_task(ask(client)) for ask in asks()]
        await until(lambda: len(client.num_generated()) == len(first.submits) > 0)

        await first.kill()

        assert list(await asyncio.gather(*answers)) == expected
    assert second.resumed == []


async def test_a_whole_answer_that_cannot_go_on_begins_again() -> None:
    first, second = Machine(0), Machine(1, fingerprint="another model's")
    body = chat_body(logprobs=True, n=2, seed=1)
    async with running(first, second) as client:
        expected, _ = await asyncio.gather(*(over_http(f"r{k}", CHAT, body)(client) for k in "01"))
        first.goes_on.clear()
        second.submits.clear()
        answers = [asyncio.create_task(over_http(f"r{k}", CHAT, body)(client)) for k in "01"]
        await until(lambda: sum(answer.done() for answer in answers) == 1)
        await until(lambda: client.num_generated() == [NUM_TOKENS // 2] * 2)

        await first.kill()
        got = await asyncio.gather(*answers)

    assert [re.sub("r1", "r0", one) for one in got] == [expected] * 2
    assert second.resumed == []


