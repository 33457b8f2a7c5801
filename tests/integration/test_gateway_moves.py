"""Answers that outlive their executor: each is what it would have been, and nobody hears of it.

The machines' k-th token is a function of prompt, seed and k (`tests/machine.py`).
"""

import asyncio
import functools
import itertools
import json
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from prometheus_client import REGISTRY

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2 as pb_gateway
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_gateway_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from lab.stack.link_proxy import LinkProxy
from services.gateway.live.failover import moves, rules
from services.gateway.live.failover.moves import _trial
from services.kit.rpc import name_of_request
from tests.fake_executor import MODEL, PROMPT_DIGEST, Script
from tests.gateways import Client, chat_body, gateway_for, gateway_with, stream_body, until
from tests.machine import NUM_TOKENS, Machine

CHAT = "/v1/chat/completions"


@asynccontextmanager
async def running(*machines: Machine, **overrides: object) -> AsyncIterator[Client]:
    async with gateway_with(*machines, **overrides) as client:
        yield client
    assert [submit for machine in machines for submit in machine.wrong] == []


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


def num_unfinished(client: Client) -> int:
    return sum(number < NUM_TOKENS for number in client.num_generated())


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


async def test_the_last_tokens_are_generated_again_and_no_reader_gets_them_twice() -> None:
    expected = await undisturbed()
    first, second = Machine(0), Machine(1)
    async with running(first, second, failover_overlap_tokens=4) as client:
        answers = await half_way(first, client)

        await first.kill()

        assert list(await asyncio.gather(*answers)) == expected
    for submit in second.resumed:
        resume, sampling = submit.resume, submit.sampling
        num_given = NUM_TOKENS // 2 - 4 * sampling.HasField("seed")  # another draw may differ
        assert len(resume.output_ids) == resume.num_delivered_tokens == num_given
    assert any(submit.sampling.HasField("seed") for submit in second.resumed)


@pytest.mark.logs("overlap_differs")
async def test_an_answer_whose_last_tokens_come_out_otherwise_ends_with_an_error() -> None:
    machines = [Machine(0), Machine(1)]

    def script_for(submit: pb.Submit) -> Script:
        script = machines[0]._script_for(submit)
        if submit.HasField("resume"):
            script.texts[len(submit.resume.output_ids) + 1].id += 1
        return script

    for machine in machines:
        machine.script_for = script_for
    machines[0].goes_on.clear()
    async with running(*machines, failover_overlap_tokens=4) as client:
        (stream,) = await streams_midway(client, 1)
        (home,) = [machine for machine in machines if machine.submits]
        machines[0].goes_on.set()
        await home.kill()
        answer = await stream

    assert "came to token" in error_in(answer)["message"]
    assert "[DONE]" not in answer


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
        # The other one's may be complete and live: two answers of a stream end together.
        await until(lambda: num_unfinished(client) == len(first.submits) > 0)

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


def ask_for_stream(client: Client, name: str, **parameters: object) -> "asyncio.Task[str]":
    body = stream_body(**parameters)
    return asyncio.create_task(over_http(name, CHAT, body)(client))


def error_in(answer: str) -> dict[str, str]:
    """Return the error that a stream ends with, its only one."""
    last = answer.strip().split("\n\n")[-1]
    return json.loads(last.removeprefix("data: "))["error"]


async def streams_midway(client: Client, number: int) -> list["asyncio.Task[str]"]:
    """Begin streams, and wait until each has half of its tokens."""
    streams = [ask_for_stream(client, f"r{k}", seed=k) for k in range(number)]
    await until(lambda: all_are_midway(client, number))
    return streams


async def streams_undisturbed(number: int) -> list[str]:
    async with running(Machine()) as client:
        streams = [ask_for_stream(client, f"r{k}", seed=k) for k in range(number)]
        return list(await asyncio.gather(*streams))


# -- when nothing can be done --------------------------------------------------------------------


@pytest.mark.logs("request_not_moved")
async def test_an_error_says_why_an_answer_could_not_go_on_in_time() -> None:
    only = Machine()
    only.goes_on.clear()
    async with running(only, failover_timeout_s=0.6) as client:
        (stream,) = await streams_midway(client, 1)
        await only.kill()
        await asyncio.sleep(0.3)
        assert not stream.done()

        error = error_in(await stream)

    assert error["code"] == "executor_lost"
    assert "no executor that could go on with it is connected" in error["message"]


@pytest.mark.parametrize(
    ("facts", "settings", "why"),
    [
        pytest.param({"fingerprint": ""}, {}, "does not say what it takes", id="no-fingerprint"),
        pytest.param({}, {"failover_timeout_s": 0.0}, "do not move here", id="off"),
        pytest.param({}, {"failover_max_tokens": 11}, "more than 11 tokens", id="too-long"),
    ],
)
async def test_what_cannot_move_ends_with_an_error_at_once(facts, settings, why) -> None:
    first, second = Machine(0, **facts), Machine(1, **facts)
    first.goes_on.clear()
    second.goes_on.clear()
    async with running(first, second, **settings) as client:
        streams = await streams_midway(client, 2)
        await first.kill()
        second.goes_on.set()
        answers = await asyncio.gather(*streams)

    (error,) = (error_in(answer) for answer in answers if "[DONE]" not in answer)
    assert error["code"] == "executor_lost"
    assert why in error["message"]
    assert second.resumed == []


async def test_answers_move_between_executors_of_one_fingerprint_with_room_only() -> None:
    other = Machine(1, fingerprint="another")
    small = Machine(2)
    small.max_model_len = 30
    only = Machine(0)
    only.goes_on.clear()
    async with running(only, other, small, failover_timeout_s=0.5) as client:
        streams = [ask_for_stream(client, f"r{k}", max_tokens=NUM_TOKENS) for k in range(3)]
        await until(lambda: sum(stream.done() for stream in streams) == 2)
        await until(lambda: all_are_midway(client, 1))
        await only.kill()
        answers = await asyncio.gather(*streams)

    assert ["[DONE]" in answer for answer in answers].count(False) == 1
    assert other.resumed == small.resumed == []


async def test_between_unequal_numerics_nothing_moves_where_that_is_said() -> None:
    first, second = Machine(0), Machine(1, numerics="gpu")
    first.goes_on.clear()
    async with running(
        first, second, failover_timeout_s=0.5, failover_across_numerics=False
    ) as client:
        streams = [ask_for_stream(client, f"r{k}") for k in range(2)]
        await until(lambda: all_are_midway(client, 1))
        await first.kill()
        answers = await asyncio.gather(*streams)

    assert ["[DONE]" in answer for answer in answers].count(False) == 1
    assert second.resumed == []


CANNOT = pb.Rejected(code=pb.REJECT_CODE_CANNOT_RESUME, message="the prompt is another one here")
FULL = pb.Rejected(code=pb.REJECT_CODE_OVERLOADED, message="the queue is full")


def refuse_resumes(machine: Machine, reject: pb.Rejected, *, times: int = sys.maxsize) -> None:
    """Have a machine refuse answers that were begun elsewhere, so many times."""
    number = 0

    def script_for(submit: pb.Submit) -> Script:
        nonlocal number
        number += submit.HasField("resume")
        is_refused = submit.HasField("resume") and number <= times
        return Script(reject=reject) if is_refused else machine._script_for(submit)

    machine.script_for = script_for


async def test_an_executor_that_cannot_go_on_with_an_answer_leads_to_the_next() -> None:
    (expected,) = await streams_undisturbed(1)
    machines = [Machine(number) for number in range(3)]
    for machine in machines:
        machine.goes_on.clear()
    async with running(*machines) as client:
        (stream,) = await streams_midway(client, 1)
        (asked,) = (machine for machine in machines if machine.submits)
        rest = [machine for machine in machines if machine is not asked]
        refuse_resumes(rest[0], CANNOT)
        for machine in rest:
            machine.goes_on.set()
        # Which of the two is asked first is open: have one refuse, then the other.
        await asked.kill()
        assert await stream == expected

    assert len(rest[1].resumed) == 1
    assert len(rest[0].resumed) <= 1


async def test_when_all_executors_refuse_an_answer_the_error_says_why() -> None:
    first, second = Machine(0), Machine(1)
    for machine in (first, second):
        machine.goes_on.clear()
        refuse_resumes(machine, CANNOT)
    async with running(first, second) as client:
        streams = await streams_midway(client, 2)
        await first.kill()
        second.goes_on.set()
        answers = await asyncio.gather(*streams)

    (error,) = (error_in(answer) for answer in answers if "[DONE]" not in answer)
    assert "the prompt is another one here" in error["message"]
    assert len(second.resumed) == 1


@pytest.mark.logs("request_not_moved")
async def test_an_answer_that_finds_no_room_in_time_says_so() -> None:
    first, second = Machine(0), Machine(1)
    for machine in (first, second):
        machine.goes_on.clear()
        refuse_resumes(machine, FULL)
    async with running(first, second, failover_timeout_s=1.0) as client:
        streams = await streams_midway(client, 2)
        await first.kill()
        second.goes_on.set()
        answers = await asyncio.gather(*streams)

    (error,) = (error_in(answer) for answer in answers if "[DONE]" not in answer)
    assert FULL.message in error["message"]
    assert second.resumed


async def test_an_executor_without_room_is_asked_again() -> None:
    expected = await streams_undisturbed(2)
    first, second = Machine(0), Machine(1)
    first.goes_on.clear()
    second.goes_on.clear()
    refuse_resumes(second, FULL, times=2)
    async with running(first, second) as client:
        streams = await streams_midway(client, 2)
        await first.kill()
        second.goes_on.set()
        assert list(await asyncio.gather(*streams)) == expected

    assert len(second.resumed) == 3


# -- in the gap ----------------------------------------------------------------------------------


def waited_for_another() -> float:
    """Return for how long readers waited for their answers to move."""
    name = "evenflow_rebuffering_seconds_total"
    return REGISTRY.get_sample_value(name, {"cause": "failover"}) or 0.0


async def test_in_the_gap_readers_get_what_is_there_at_its_pace_and_comments() -> None:
    only = Machine()
    only.goes_on.clear()
    pace, before = {"consumption_rate_tps": 20}, waited_for_another()
    body = stream_body(evenflow=pace, max_tokens=40)
    async with (
        running(only, sse_keepalive_s=0.05) as client,
        client.http.stream("POST", CHAT, json=body) as answer,
    ):
        lines = answer.aiter_lines()
        await until(lambda: client.num_generated() == [20])  # a second of reading
        await only.kill()
        told = [await anext(lines) for _ in range(60)]
        only.goes_on.set()
        await only.start()
        told += [line async for line in lines]

    assert ": keep-alive" in told[:60]  # a second of text was told, then there was nothing
    assert sum('"content":"' in line for line in told[:60]) > 5
    assert "data: [DONE]" in told
    assert waited_for_another() > before
    assert not any('"error"' in line for line in told)
    (resume,) = (submit.resume for submit in only.resumed)
    assert len(resume.output_ids) == 20


async def test_a_request_that_is_cancelled_in_the_gap_ends_and_goes_on_nowhere() -> None:
    only = Machine()
    only.goes_on.clear()
    message = gen.ChatMessage(role="user", content="Say hello.")
    async with running(only) as client:
        stub = pb_gateway_grpc.GatewayServiceStub(client.channel)
        request = pb_gateway.ChatRequest(model=MODEL, messages=[message])
        call = stub.Chat(request, metadata=[("x-request-id", "r")])
        await until(lambda: all_are_midway(client, 1))
        await only.kill()
        await until(lambda: not client.gateway.dispatcher.is_ready)

        await stub.Cancel(pb_gateway.CancelRequest(request_id="r"))
        parts = [part async for part in call]
        await only.start()
        await client.wait_ready()
        await asyncio.sleep(0.6)

    assert parts[-1].finish.reason == gen.FINISH_REASON_CANCELLED
    assert only.resumed == []


async def test_a_client_that_leaves_in_the_gap_is_forgotten() -> None:
    only = Machine()
    only.goes_on.clear()
    async with running(only) as client:
        async with client.http.stream("POST", CHAT, json=stream_body()):
            await until(lambda: all_are_midway(client, 1))
            await only.kill()
            await until(lambda: not client.gateway.dispatcher.is_ready)
        await client.wait_idle()
        await only.start()
        await client.wait_ready()
        await asyncio.sleep(0.6)

    assert only.resumed == []


async def test_a_gateway_that_drains_goes_on_moving_answers() -> None:
    expected = await streams_undisturbed(2)
    first, second = Machine(0), Machine(1)
    first.goes_on.clear()
    second.goes_on.clear()
    async with running(first, second) as client:
        streams = await streams_midway(client, 2)
        client.gateway.dispatcher.start_draining()
        await first.kill()
        second.goes_on.set()
        assert list(await asyncio.gather(*streams)) == expected


async def test_generation_stays_held_for_a_reader_that_lags() -> None:
    only = Machine()
    only.goes_on.clear()
    pace = {"consumption_rate_tps": 1}
    async with (
        running(only, max_deposit_bytes=1 << 10) as client,
        client.http.stream("POST", CHAT, json=stream_body(evenflow=pace)),
    ):
        await until(lambda: [held for _, held in only.holds] == [True])
        await only.kill()
        await until(lambda: not client.gateway.dispatcher.is_ready)
        num_tokens = client.num_generated()  # what was under way when it was held, too
        await only.start()
        await only.until(lambda: len(only.holds) == 2)

    assert only.holds[1][1]
    assert len(only.resumed[0].resume.output_ids) == num_tokens[0]
    assert only.resumed[0].resume.last_due_age_s < 0  # the newest is due later


async def test_those_move_first_whose_readers_run_dry_first(monkeypatch) -> None:
    monkeypatch.setattr(rules, "TRIAL_S", 0.0)
    first, second = Machine(0), Machine(1)
    first.goes_on.clear()
    second.goes_on.clear()
    rates = {"slow": 1, "fast": 2, "at-once": None}
    async with running(first, second) as client:
        second.takes.clear()
        streams = [
            ask_for_stream(client, name, evenflow={"consumption_rate_tps": rate})
            for name, rate in rates.items()
            for _ in range(2)  # one of the two goes to each
        ]
        whole = [asyncio.create_task(over_http("whole", CHAT, chat_body())(client))] * 2
        await until(lambda: len(first.submits) == 4 or len(second.submits) == 4)
        second.takes.set()
        await until(lambda: set(client.num_generated()) == {NUM_TOKENS // 2})
        moved = [name_of_request(submit.request_id) for submit in first.submits]

        await first.kill()
        second.goes_on.set()
        await asyncio.wait([*whole, *streams], return_when=asyncio.FIRST_COMPLETED)
        await until(lambda: len(second.resumed) == len(moved))
        for stream in streams:
            stream.cancel()

    order = [name_of_request(submit.request_id) for submit in second.resumed]
    assert order == [name for name in ("at-once", "fast", "slow", "whole") if name in moved]


async def test_at_most_32_are_under_way_at_a_time(monkeypatch) -> None:
    monkeypatch.setattr(rules, "TRIAL_S", 0.0)
    expected = await streams_undisturbed(80)
    first, second = Machine(0), Machine(1)
    first.goes_on.clear()
    second.goes_on.clear()
    async with running(first, second) as client:
        streams = await streams_midway(client, 80)
        second.takes.clear()
        await first.kill()
        await until(lambda: len(second.resumed) == 32)
        await asyncio.sleep(0.3)
        assert len(second.resumed) == 32
        second.takes.set()
        second.goes_on.set()
        assert list(await asyncio.gather(*streams)) == expected
    assert len(second.resumed) == 40


async def test_over_grpc_the_ending_tells_how_often_an_answer_moved(monkeypatch) -> None:
    monkeypatch.setattr(rules, "TRIAL_S", 0.0)
    only = Machine()
    only.goes_on.clear()
    message = gen.ChatMessage(role="user", content="Say hello.")
    async with running(only) as client:
        stub = pb_gateway_grpc.GatewayServiceStub(client.channel)
        call = stub.Chat(pb_gateway.ChatRequest(model=MODEL, messages=[message]))
        for num_moves in (1, 2):
            await until(lambda: all_are_midway(client, 1))
            await only.kill()
            await only.start()
            await until(lambda num_moves=num_moves: len(only.resumed) == num_moves)
        only.goes_on.set()
        parts = [part async for part in call]

    assert parts[-1].finish.moves == 2
    assert parts[-1].finish.usage.num_output_tokens == NUM_TOKENS


# -- requests that executors are lost to ---------------------------------------------------------


class Deadly(asyncio.Event):
    """A gate at which its machine dies, some time after what it has said has arrived."""

    def __init__(self, machine: Machine, after_s: float = 0.0) -> None:
        super().__init__()
        self._machine = machine
        self._after_s = after_s

    async def wait(self) -> bool:
        await asyncio.sleep(self._after_s)
        self._machine.dying = asyncio.create_task(self._machine.kill())
        return await super().wait()


def poisoned(machine: Machine, *, at_prompt: bool) -> None:
    """Have a machine die of requests that say so, at their prompt or at their 40th token."""

    def script_for(submit: pb.Submit) -> Script:
        script = machine._script_for(submit)
        if submit.chat.messages[-1].content == "poison" and at_prompt:
            script.accepting = Deadly(machine)
        elif submit.chat.messages[-1].content == "poison":
            script.midway = Deadly(machine, 0.0 if submit.HasField("resume") else 0.4)
        return script

    machine.script_for = script_for


@pytest.mark.parametrize(("at_prompt", "num_lost"), [(True, 2), (False, 3)])
async def test_a_request_that_executors_are_lost_to_fails_and_no_other(
    monkeypatch, at_prompt, num_lost
) -> None:
    monkeypatch.setattr(rules, "TRIAL_S", 0.3)
    monkeypatch.setattr(rules, "MAX_TRIAL_S", 0.3)  # the innocents make no token meanwhile
    expected = await streams_undisturbed(21)
    machines = [Machine(number) for number in range(5)]
    for machine in machines:
        machine.goes_on.clear()
        poisoned(machine, at_prompt=at_prompt)
    turns = [{"role": "user", "content": "poison"}]
    async with running(*machines) as client:
        streams = await streams_midway(client, 21)
        body = stream_body(messages=turns, max_tokens=80)
        poison = await client.http.post(CHAT, json=body)
        for machine in machines:
            machine.goes_on.set()
        assert list(await asyncio.gather(*streams)) == expected
        num_alive = sum(machine._server is not None for machine in machines)

    assert len(machines) - num_alive == num_lost
    if at_prompt:
        assert (poison.status_code, poison.json()["error"]["code"]) == (500, "generation_failed")
    else:
        assert error_in(poison.text)["code"] == "generation_failed"


class DeadlyAtLast(asyncio.Event):
    """A gate at which its machine dies when the request has waited for longer than a trial lasts,
    and all others have proved well there.
    """

    def __init__(self, machine: Machine, client: Client, poison: str) -> None:
        super().__init__()
        self._machine, self._client, self._poison = machine, client, poison

    async def wait(self) -> bool:
        await until(self._is_time)
        self._machine.dying = asyncio.create_task(self._machine.kill())
        return await super().wait()

    def _is_time(self) -> bool:
        """Say whether the request waits, and nobody else may be what the machine is lost to."""
        moves, live = self._client.gateway.dispatcher.moves, self._client.gateway.dispatcher._live
        counts = {
            request_id: _trial(one, moves._clock()).count
            for request_id, one in live.items()
            if not one.generation.is_over
        }
        is_placed = not moves._lost and all(one.home is not None for one in live.values())
        others = [n for request_id, n in counts.items() if self._poison not in request_id]
        return is_placed and 0.5 in counts.values() and not any(others)


async def test_one_that_executors_are_lost_to_after_a_time_in_the_queue_fails_and_no_other(
    monkeypatch,
) -> None:
    monkeypatch.setattr(rules, "TRIAL_S", 0.3)
    long = {"max_tokens": 400}
    async with running(Machine()) as client:
        streams = [ask_for_stream(client, f"r{k}", seed=k, **long) for k in range(21)]
        expected = list(await asyncio.gather(*streams))
    machines = [Machine(number) for number in range(6)]
    async with running(*machines) as client:

        def script_of(machine: Machine, submit: pb.Submit) -> Script:
            script = machine._script_for(submit)
            if submit.chat.messages[-1].content == "poison":
                script.generating = DeadlyAtLast(machine, client, "poison")
            return script

        for machine in machines:
            machine.interval_s = 0.01
            machine.script_for = functools.partial(script_of, machine)
        streams = [ask_for_stream(client, f"r{k}", seed=k, **long) for k in range(21)]
        turns = [{"role": "user", "content": "poison"}]
        headers = {"x-request-id": "poison"}
        poison = await client.http.post(CHAT, json=chat_body(messages=turns), headers=headers)
        assert list(await asyncio.gather(*streams)) == expected
        num_alive = sum(machine._server is not None for machine in machines)

    assert (poison.status_code, poison.json()["error"]["code"]) == (500, "generation_failed")
    assert len(machines) - num_alive == 4  # each counts half


async def test_a_link_that_is_cut_says_nothing_of_the_requests_on_it(monkeypatch) -> None:
    monkeypatch.setattr(rules, "TRIAL_S", 600.0)
    monkeypatch.setattr(moves, "BACK_S", 600.0)
    expected = await streams_undisturbed(1)
    machines = Machine(0), Machine(1)
    for machine in machines:
        machine.goes_on.clear()
        await machine.start()
    with LinkProxy(machines[0].address) as first, LinkProxy(machines[1].address) as second:
        async with gateway_for(first, second) as client:
            await until(lambda: all(machine.session for machine in machines))
            streams = await streams_midway(client, 1)
            for number in range(1, 5):
                for link in (first, second):
                    link.cut()
                await until(lambda n=number: sum(len(one.resumed) for one in machines) == n)
            for machine in machines:
                machine.goes_on.set()
            assert list(await asyncio.gather(*streams)) == expected
    for machine in machines:
        await machine.kill()


async def test_requests_that_may_be_to_blame_are_tried_one_at_a_time(monkeypatch) -> None:
    monkeypatch.setattr(rules, "TRIAL_S", 1.0)
    monkeypatch.setattr(rules, "MAX_TRIAL_S", 1.0)  # none of them makes a token meanwhile
    expected = await streams_undisturbed(4)
    first, second = Machine(0), Machine(1)
    first.goes_on.clear()
    second.goes_on.clear()
    async with running(first, second) as client:
        streams = await streams_midway(client, 4)  # two each, all of them new
        await first.kill()
        await until(lambda: len(second.resumed) == 1)
        await asyncio.sleep(0.5)
        assert len(second.resumed) == 1
        await until(lambda: len(second.resumed) == 2)
        second.goes_on.set()
        assert list(await asyncio.gather(*streams)) == expected


def trials_at(client: Client, machine: Machine) -> dict[str, rules.Trial]:
    """Return how the requests do that a machine has."""
    dispatcher = client.gateway.dispatcher
    return {
        name_of_request(request_id): _trial(live, dispatcher.moves._clock())
        for request_id, live in dispatcher._live.items()
        if live.home is not None
        and live.home.address == machine.address
        and request_id not in dispatcher.moves._lost
        and not live.generation.is_over
    }


async def test_one_that_may_be_to_blame_has_proved_well_with_few_tokens(
    monkeypatch,
) -> None:
    monkeypatch.setattr(rules, "TRIAL_S", 600.0)
    monkeypatch.setattr(moves, "BACK_S", 0.0)
    machines = first, second = Machine(0), Machine(1)
    for machine in machines:
        machine.interval_s = 0.2
    async with running(*machines) as client:
        streams = [ask_for_stream(client, f"r{k}", max_tokens=400) for k in range(4)]
        await until(lambda: len(client.num_generated()) == 4 and all(client.num_generated()))
        await first.kill()
        await until(lambda: second.resumed)
        resumed = name_of_request(second.resumed[0].request_id)
        await until(lambda: len(second.resumed) == 2)
        tried = trials_at(client, second)[resumed]
        for stream in streams:
            stream.cancel()

    assert rules.TRIED_TOKENS <= tried.num_tokens < rules.TRIAL_TOKENS


async def die_at(
    num_tokens: int, client: Client, machines: list[Machine], poison: "asyncio.Task[httpx.Response]"
) -> int:
    """Have each machine die when the poison has so many tokens there, and start again, until it
    fails or has cost five. Returns how often one died.
    """

    def has_it(machine: Machine) -> bool:
        found = trials_at(client, machine).get("poison")
        return found is not None and found.num_tokens >= num_tokens

    for num_lost in range(5):
        await until(lambda: any(map(has_it, machines)) or poison.done())
        if poison.done():
            return num_lost
        (machine,) = filter(has_it, machines)
        await machine.kill()
        await until(lambda: not has_it(machine))  # noqa: B023
        await machine.start()
    return 5


@pytest.mark.parametrize(
    ("is_stream", "num_kept", "num_tokens"),
    [
        pytest.param(True, 1_000, 3, id="goes-on"),
        pytest.param(False, 0, 10, id="begins_again_and_kills"),
    ],
)
async def test_one_that_kills_at_a_token_of_each_trial_fails_and_no_other(
    monkeypatch, is_stream: bool, num_kept: int, num_tokens: int
) -> None:
    monkeypatch.setattr(rules, "TRIAL_S", 600.0)
    monkeypatch.setattr(moves, "BACK_S", 0.0)
    bodies = [chat_body(stream=is_stream, max_tokens=80, seed=k) for k in range(7)]
    asks = [over_http(f"r{k}", CHAT, body) for k, body in enumerate(bodies[:6])]
    async with running(Machine()) as client:
        expected = await asyncio.gather(*(ask(client) for ask in asks))
    machines = [Machine(0), Machine(1)]
    for machine in machines:
        machine.interval_s = 0.1
    async with running(*machines, failover_max_tokens=num_kept) as client:
        answers = [asyncio.create_task(ask(client)) for ask in asks]
        headers = {"x-request-id": "poison"}
        poison = asyncio.create_task(client.http.post(CHAT, json=bodies[6], headers=headers))
        num_lost = await die_at(num_tokens, client, machines, poison)
        assert "generation_failed" in (await poison).text
        assert await asyncio.gather(*answers) == expected

    assert num_lost == 2


# -- executors that fail, hang, or leave ----------------------------------------------------------


def give_up_on(submit: pb.Submit, machine: Machine) -> None:
    """Have the engine of a machine die of what it has begun; its front, and the link, last."""
    assert machine.session is not None
    failure = pb.Failure(retryable=True, message="the engine has died")
    machine.session.end(submit.request_id, NUM_TOKENS // 2, pb.Ending(failure=failure))


async def test_what_an_engine_gives_up_on_goes_on_elsewhere() -> None:
    expected = await streams_undisturbed(2)
    first, second = Machine(0), Machine(1)
    first.goes_on.clear()
    second.goes_on.clear()
    async with running(first, second) as client:
        streams = await streams_midway(client, 2)
        give_up_on(first.submits[0], first)
        await until(lambda: len(second.resumed) == 1)
        second.goes_on.set()
        assert list(await asyncio.gather(*streams)) == expected


async def test_no_other_suspect_goes_where_an_engine_has_just_died_of_one(monkeypatch) -> None:
    monkeypatch.setattr(rules, "TRIAL_S", 600.0)
    monkeypatch.setattr(moves, "BACK_S", 600.0)
    expected = await streams_undisturbed(2)
    first, second, third = machines = [Machine(number) for number in range(3)]
    for machine in machines:
        machine.goes_on.clear()
    async with running(*machines) as client:
        await third.kill()
        await until(lambda: len(client.gateway.dispatcher.moves._routes.candidates()) == 2)
        streams = await streams_midway(client, 2)  # one each
        give_up_on(first.submits[0], first)
        await until(lambda: len(second.resumed) == 1)
        (other,) = second.begun
        give_up_on(other, second)  # the one beside it is on trial there
        await third.start()
        await until(lambda: len(first.resumed) + len(third.resumed) == 1)
        for machine in machines:
            machine.goes_on.set()
        assert list(await asyncio.gather(*streams)) == expected

    assert [submit.request_id for submit in third.resumed] == [other.request_id]
    assert first.resumed == []


STALL_S = 6.0  # longer than what comes from a machine that goes on is under way on a busy one


def beat(machine: Machine, num_steps: int) -> None:
    """Have a machine say how many steps its engine has made."""
    assert machine.session is not None
    machine.session.num_steps = num_steps
    machine.session.send()


@asynccontextmanager
async def stepping(machine: Machine) -> AsyncIterator[None]:
    """Have a machine say again and again that its engine makes steps, also of a slow test."""

    async def step() -> None:
        for number in itertools.count(8):
            beat(machine, number)
            await asyncio.sleep(0.1)

    task = asyncio.create_task(step())
    yield
    task.cancel()


@pytest.mark.logs("executor_lost")
async def test_an_executor_that_says_nothing_is_given_up() -> None:
    expected = await streams_undisturbed(2)
    first, second = Machine(0), Machine(1)
    first.goes_on.clear()
    second.goes_on.clear()
    async with running(first, second, link_stall_s=STALL_S) as client:
        streams = await streams_midway(client, 2)
        beat(first, 7)
        while not second.resumed:
            beat(second, 7)
            await asyncio.sleep(0.1)
        assert len(second.resumed) == 1
        second.goes_on.set()
        assert list(await asyncio.gather(*streams)) == expected
    assert len(first.epochs) == 2
    assert len(second.epochs) == 1


async def test_an_engine_that_makes_no_step_while_readers_wait_is_given_up() -> None:
    expected = await streams_undisturbed(2)
    first, second = Machine(0), Machine(1)
    first.goes_on.clear()
    second.goes_on.clear()
    async with running(first, second, engine_stall_s=STALL_S) as client:
        streams = await streams_midway(client, 2)
        async with stepping(second):
            while not second.resumed:
                beat(first, 7)
                await asyncio.sleep(0.1)
            second.goes_on.set()
            assert list(await asyncio.gather(*streams)) == expected

            await first.until(lambda: len(first.epochs) == 2)  # its front goes on, its engine hangs
            await first.until(lambda: len(first.submits) == 2)
            probe, num_submits = first.submits[-1], len(second.submits)
            await asyncio.gather(*(ask_for_stream(client, f"s{k}") for k in range(3)))
            assert (probe.sampling.max_tokens, len(probe.token_ids.ids)) == (1, 1)
            assert len(second.submits) == num_submits + 3
            first.goes_on.set()
            while len(first.submits) == 2:
                await ask_for_stream(client, "again")
    assert len(second.epochs) == 1


async def test_a_request_that_engines_hang_at_fails(monkeypatch) -> None:
    monkeypatch.setattr(rules, "TRIAL_S", 0.1)  # engines hang for longer
    machines = [Machine(number) for number in range(3)]
    for machine in machines:
        machine.goes_on.clear()
    async with running(*machines, engine_stall_s=0.6) as client:
        stream = ask_for_stream(client, "r", max_tokens=1)
        while not stream.done():
            for machine in machines:
                beat(machine, 7)
            await asyncio.sleep(0.1)
        hung = [machine for machine in machines if machine.submits]

    assert error_in(await stream)["code"] == "generation_failed"
    assert len(hung) == 2


async def test_an_engine_may_rest_while_readers_have_enough() -> None:
    only = Machine()
    only.goes_on.clear()
    body = stream_body(evenflow={"consumption_rate_tps": 2})
    async with (
        running(only, engine_stall_s=0.5) as client,
        client.http.stream("POST", CHAT, json=body),
    ):
        await until(lambda: all_are_midway(client, 1))
        for _ in range(20):
            beat(only, 7)
            await asyncio.sleep(0.1)
        assert len(only.epochs) == 1


def leave(machine: Machine) -> None:
    """Have a machine say that it shuts down."""
    assert machine.session is not None
    machine.session.is_leaving = True
    machine.session.send()


@pytest.mark.logs("executor_leaving")
async def test_answers_leave_with_all_tokens_that_they_have_where_an_executor_shuts_down() -> None:
    names = [f"r{k}" for k in range(40)]
    async with running(Machine()) as client:
        streams = [ask_for_stream(client, name, seed=3, max_tokens=150) for name in names]
        expected = list(await asyncio.gather(*streams))
    first, second = Machine(0), Machine(1)
    for machine in (first, second):
        machine.interval_s = 0.005
    first.goes_on.clear()  # none of its answers ends before it is asked to end
    async with running(first, second) as client:
        streams = [ask_for_stream(client, name, seed=3, max_tokens=150) for name in names]
        await until(lambda: len(first.submits) + len(second.submits) == len(names))
        await until(lambda: min(client.num_generated()) > 2)
        leave(first)
        await first.until(lambda: bool(first.aborted))
        late = ask_for_stream(client, "late")
        assert list(await asyncio.gather(*streams)) == expected
        await late
        resumed = [name_of_request(submit.request_id) for submit in second.resumed]
        assert sorted(first.aborted) == sorted(resumed)
        num_first = len(first.submits)

    assert num_first == len(second.resumed) == len(names) // 2
    assert len(second.begun) == len(names) // 2 + 1


async def test_where_all_leave_answers_stay_and_the_gateway_is_not_ready() -> None:
    expected = await streams_undisturbed(1)
    only = Machine()
    only.goes_on.clear()
    async with running(only) as client:
        streams = await streams_midway(client, 1)
        leave(only)
        await until(lambda: not client.gateway.dispatcher.is_ready)
        refused = await client.http.post(CHAT, json=chat_body())
        await asyncio.sleep(0.6)
        only.goes_on.set()
        assert list(await asyncio.gather(*streams)) == expected

    assert refused.status_code == 503
    assert only.aborted == []


# -- what is told --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numerics", "is_repeatable", "continued"),
    [
        ("cpu", True, "identical"),
        ("gpu", True, "valid"),
        ("cpu", False, "valid"),
    ],
)
async def test_who_asks_by_evenflow_hears_of_moves(numerics, is_repeatable, continued) -> None:
    first, second = Machine(0), Machine(1, numerics=numerics)
    first.is_repeatable = second.is_repeatable = is_repeatable
    turns = chat_body()["messages"]
    asked = {"model": MODEL, "stream": True, "evenflow": {}, "seed": 1}
    bodies = {
        CHAT: asked | {"messages": turns},
        "/v1/completions": asked | {"prompt": "Once", "max_tokens": NUM_TOKENS},
        "/v1/responses": asked | {"input": "Hello"},
        "/v1/messages": asked | {"messages": turns, "max_tokens": NUM_TOKENS},
    }
    kinds = [(path, streams) for path in bodies for streams in (False, True)]
    asks = [over_http(path, path, bodies[path] | {"stream": streams}) for path, streams in kinds]
    first.goes_on.clear()
    second.goes_on.clear()
    async with running(first, second) as client:
        answers = [asyncio.create_task(ask(client)) for ask in asks for _ in range(2)]
        await until(lambda: all_are_midway(client, len(answers)))
        await first.kill()
        second.goes_on.set()
        told = await asyncio.gather(*answers)

    moved = [answer for answer in told if '"evenflow":{"moves":1' in answer]
    assert len(moved) == len(asks)
    assert all(f'"evenflow":{{"moves":1,"continued":"{continued}"}}' in answer for answer in moved)


@pytest.mark.parametrize(
    ("seed", "continued"), [({"seed": 1}, "identical"), ({}, "valid")], ids=["seed", "none"]
)
async def test_what_no_executor_had_taken_is_what_the_one_makes_of_it_that_takes_it(
    seed: dict[str, int], continued: str
) -> None:
    first, second = Machine(0), Machine(1, numerics="gpu")
    first.takes.clear()
    body = stream_body(evenflow={}, temperature=1, **seed)
    async with running(first, second) as client:
        answers = [asyncio.create_task(over_http(f"r{k}", CHAT, body)(client)) for k in "01"]
        await until(lambda: len(first.submits) == 1 and any(answer.done() for answer in answers))
        await first.kill()
        told = await asyncio.gather(*answers)

    (moved,) = [answer for answer in told if '"evenflow":{"moves":1' in answer]
    assert f'"evenflow":{{"moves":1,"continued":"{continued}"}}' in moved
