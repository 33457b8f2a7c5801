"""Answers whose client sends the same body again, with the ids that it has: `evenflow.resume`.

The machines' k-th token is a function of prompt, seed and k (`tests/machine.py`), and no gateway or
executor has seen the answer before.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
from grpc import aio
from prometheus_client import REGISTRY

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2 as pb_gateway
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_gateway_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from examples.resume import sent_again
from tests.fake_executor import MODEL, Script
from tests.gateways import Client, chat_body, gateway_for, started, stream_body, until
from tests.machine import NUM_TOKENS, Machine
from tests.sent_again import DONE, Body, again, as_events, behind, events_of, ids_in, with_ids

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
COUNTS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
COMPLETION = {"model": MODEL, "prompt": "Once", "stream": True, "max_tokens": NUM_TOKENS}

KINDS = {
    "text": (CHAT, stream_body(seed=1)),
    "calls": (CHAT, stream_body(tools=[TOOL])),
    "counts": (CHAT, stream_body(**COUNTS)),
    "paced": (CHAT, stream_body(evenflow={"consumption_rate_tps": 900})),
    "likely": (CHAT, stream_body(logprobs=True, top_logprobs=2)),
    "completion": (COMPLETIONS, COMPLETION),
    "likely-completion": (COMPLETIONS, COMPLETION | {"logprobs": 1}),
}


@asynccontextmanager
async def running(*machines: Machine, num_gateways: int = 1) -> AsyncIterator[list[Client]]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(started(*machines))
        clients = []
        for _ in range(num_gateways):
            clients.append(await stack.enter_async_context(gateway_for(*machines)))
            await clients[-1].wait_ready()
        yield clients
    assert [submit for machine in machines for submit in machine.wrong] == []


@pytest.mark.parametrize("kind", KINDS)
async def test_the_rest_is_what_an_undisturbed_answer_would_have_told(kind: str) -> None:
    path, body = KINDS[kind]
    async with running(Machine()) as (client,):
        whole = await events_of(client, path, with_ids(body))
        ids = ids_in(whole)
        assert len(ids) == NUM_TOKENS

        for given in (1, 2, 3, 4, NUM_TOKENS // 3, NUM_TOKENS // 2 + 1, NUM_TOKENS - 1):
            got = await events_of(client, path, again(with_ids(body), ids[:given]))
            assert got == behind(whole, given)


@pytest.mark.parametrize("kind", ["text", "calls", "counts", "paced", "completion"])
async def test_what_the_reader_lacks_of_the_tokens_given_is_told(kind: str) -> None:
    path, body = KINDS[kind]
    machine = Machine()
    async with running(machine) as (client,):
        whole = await events_of(client, path, with_ids(body))
        ids = ids_in(whole)

        for given, delivered in ((5, 0), (9, 2), (NUM_TOKENS, 3), (NUM_TOKENS, 0)):
            got = await events_of(client, path, again(with_ids(body), ids[:given], delivered))
            assert got == behind(whole, delivered)
        *_, resume = (submit.resume for submit in machine.resumed)
    assert resume.num_retold_tokens == len(resume.output_ids) == NUM_TOKENS
    assert resume.num_delivered_tokens == 0
    assert resume.max_tokens == 0


async def test_without_ids_the_first_event_comes_with_the_first_text() -> None:
    body = stream_body(seed=1)
    async with running(Machine()) as (client,):
        ids = ids_in(await events_of(client, CHAT, with_ids(body)))
        whole = await events_of(client, CHAT, body)

        rest = await events_of(client, CHAT, again(body, ids[:10]))

    assert rest == whole[-len(rest) :]
    assert '"role"' in whole[0]
    assert not any('"role"' in event for event in rest)


async def test_a_complete_answer_gets_its_ending() -> None:
    path, body = KINDS["counts"]
    async with running(Machine()) as (client,):
        whole = await events_of(client, path, with_ids(body))

        got = await events_of(client, path, again(with_ids(body), ids_in(whole)))

    assert got == whole[-3:]
    assert '"finish_reason":"length"' in got[0]
    assert json.loads(got[1])["usage"]["completion_tokens"] == NUM_TOKENS


def counted() -> tuple[float, float]:
    """Return how many tokens of reasoning and of content have been counted so far."""
    names = ("evenflow_reasoning_tokens_total", "evenflow_content_tokens_total")
    reasoning, content = (REGISTRY.get_sample_value(name) or 0.0 for name in names)
    return reasoning, content


@pytest.mark.parametrize("given", [2, 5, NUM_TOKENS])  # three are thoughts
async def test_tokens_that_the_client_has_sent_are_not_counted_again(given: int) -> None:
    body = with_ids(stream_body(seed=1))
    async with running(Machine()) as (client,):
        before = counted()
        ids = ids_in(await events_of(client, CHAT, body))
        whole = counted()
        await events_of(client, CHAT, again(body, ids[:given], 1))
        rest = counted()

    assert [now - then for now, then in zip(whole, before, strict=True)] == [3, NUM_TOKENS - 3]
    assert [now - then for now, then in zip(rest, whole, strict=True)] == [
        max(0, 3 - given),
        NUM_TOKENS - max(3, given),
    ]


@pytest.mark.parametrize("delivered", [0, 4, 9, None])
async def test_an_answer_that_is_not_streamed_has_what_is_not_delivered(
    delivered: int | None,
) -> None:
    body = chat_body(return_token_ids=True, seed=4)
    async with running(Machine()) as (client,):
        whole = (await client.http.post(CHAT, json=body)).json()
        ids = whole["choices"][0]["token_ids"]

        rest = (await client.http.post(CHAT, json=again(body, ids[:9], delivered))).json()

    first = 9 if delivered is None else delivered
    assert rest["choices"][0]["token_ids"] == ids[first:]
    text, all_text = (one["choices"][0]["message"]["content"] for one in (rest, whole))
    assert text
    assert all_text.endswith(text)
    assert (text == all_text) is (first <= 3)  # thoughts
    assert rest["usage"] == whole["usage"]


async def test_over_grpc_too() -> None:
    message = gen.ChatMessage(role="user", content="Say hello.")
    sampling = gen.SamplingParams(seed=3, max_tokens=NUM_TOKENS)
    chat = pb_gateway.ChatRequest(
        model=MODEL, messages=[message], sampling=sampling, returns_prompt_ids=True
    )
    prompt = pb_gateway.GenerateRequest(
        model=MODEL, text="Once", sampling=sampling, returns_prompt_ids=True
    )
    async with running(Machine()) as (client,):
        stub = pb_gateway_grpc.GatewayServiceStub(client.channel)
        for call, request in ((stub.Chat, chat), (stub.Generate, prompt)):
            whole = [part async for part in call(request)]
            tokens = [token for part in whole for token in part.tokens]
            for given, delivered in ((9, None), (NUM_TOKENS, 20), (NUM_TOKENS, None), (9, 0)):
                request.resume.token_ids[:] = [token.id for token in tokens[:given]]
                request.resume.ClearField("delivered")
                if delivered is not None:
                    request.resume.delivered = delivered
                rest = [part async for part in call(request)]

                first = given if delivered is None else delivered
                assert [token for part in rest for token in part.tokens] == tokens[first:]
                assert rest[-1].finish == whole[-1].finish
                assert any(part.HasField("prompt") for part in rest) is (first == 0)


async def test_answers_whose_gateway_ends_are_sent_again_to_another() -> None:
    machines = [Machine(0), Machine(1)]
    bodies = [(path, with_ids(body)) for path, body in KINDS.values()]
    async with running(*machines, num_gateways=2) as (first, second):
        expected = [await events_of(second, path, body) for path, body in bodies]
        for machine in machines:
            machine.goes_on.clear()
        begun = [asyncio.create_task(begin(first, path, body)) for path, body in bodies]
        await until(lambda: first.num_generated() == [NUM_TOKENS // 2] * len(bodies))
        await asyncio.sleep(0)
        first.gateway.dispatcher.fail_all()
        told = await asyncio.gather(*begun)
        for machine in machines:
            machine.goes_on.set()
        rest = [
            await events_of(second, path, again(body, ids_in(events)))
            for (path, body), events in zip(bodies, told, strict=True)
        ]

    for events, more, all_events in zip(told, rest, expected, strict=True):
        assert 0 < len(ids_in(events)) <= NUM_TOKENS // 2
        assert events + more == all_events


async def test_the_example_does_so() -> None:
    machine = Machine()
    async with running(machine, num_gateways=2) as (first, second):
        expected = [
            json.loads(one)
            for one in await events_of(second, CHAT, with_ids(stream_body()))
            if one != DONE
        ]
        machine.goes_on.clear()
        gateways = [f"{one.base_url}/v1" for one in (first, second)]
        chunks = asyncio.create_task(
            asyncio.to_thread(lambda: [*sent_again(gateways, chat_body())])
        )
        await until(lambda: first.num_generated() == [NUM_TOKENS // 2])
        first.gateway.dispatcher.fail_all()
        await until(lambda: second.num_generated() == [NUM_TOKENS // 2])
        machine.goes_on.set()

        told = await chunks

    assert [one["choices"] for one in told] == [one["choices"] for one in expected]


def home_and_other(first: Machine, second: Machine) -> tuple[Machine, Machine]:
    """Return the one that has taken the request, and the one that has not."""
    (home,) = (machine for machine in (first, second) if machine.submits)
    return home, second if home is first else first


async def begin(client: Client, path: str, body: Body) -> list[str]:
    """Return the events of an answer before it breaks off."""
    answer = await client.http.post(path, json=body, headers={"x-request-id": "r"})
    *events, failure = as_events(answer.text)
    assert "error" in json.loads(failure)
    return events


def without_moves(events: list[str]) -> list[str]:
    """Return events of an answer that moved once, less where they say so."""
    *others, last, done = events
    stays = re.sub(r',"evenflow":{"moves":1,"continued":"\w+"}', "", last)
    assert stays != last
    return [*others, stays, done]


async def test_an_answer_that_was_sent_again_outlives_its_executor() -> None:
    path, body = KINDS["likely"]
    first, second = Machine(0), Machine(1)
    async with running(first, second) as (client,):
        whole = await events_of(client, path, with_ids(body))
        for machine in (first, second):
            machine.goes_on.clear()
            machine.submits.clear()
        asked = asyncio.create_task(
            events_of(client, path, again(with_ids(body), ids_in(whole)[:5]))
        )
        await until(lambda: client.num_generated() == [NUM_TOKENS // 2])
        home, other = home_and_other(first, second)

        await home.kill()
        other.goes_on.set()

        assert without_moves(await asked) == behind(whole, 5)
    (moved,) = other.resumed
    assert len(moved.resume.output_ids) == moved.resume.num_delivered_tokens == NUM_TOKENS // 2
    assert moved.resume.num_retold_tokens == 0


@pytest.mark.parametrize("num_before", [0, 3])
async def test_so_does_one_whose_executor_has_not_told_it_again(num_before: int) -> None:
    """`num_before`: of its tokens that were told again before the executor is lost."""
    path, body = KINDS["text"]
    first, second = Machine(0), Machine(1)
    async with running(first, second) as (client,):
        whole = await events_of(client, path, with_ids(body))
        for machine in (first, second):
            machine.submits.clear()
            machine.script_for = stops_after(machine, num_before)
        asked = asyncio.create_task(
            events_of(client, path, again(with_ids(body), ids_in(whole)[:9], 6))
        )
        await until(lambda: client.num_generated() == [num_before])
        await until(lambda: bool(first.submits or second.submits))
        home, other = home_and_other(first, second)
        other.script_for = other._script_for

        await home.kill()

        assert without_moves(await asked) == behind(whole, 6)
    (moved,) = other.resumed
    assert len(moved.resume.output_ids) == 9
    assert moved.resume.num_retold_tokens == 9 - num_before


async def test_tokens_that_are_told_again_are_no_proof_that_a_request_is_harmless() -> None:
    path, body = COMPLETIONS, with_ids(COMPLETION | {"max_tokens": 60})
    first, second = Machine(0), Machine(1)
    async with running(first, second) as (client,):
        whole = await events_of(client, path, body)
        for machine in (first, second):
            machine.submits.clear()
            machine.script_for = stops_after(machine, 40)
        asked = asyncio.create_task(events_of(client, path, again(body, ids_in(whole)[:50])))
        await until(lambda: client.num_generated() == [40])  # 32 that it made would be enough
        home, other = home_and_other(first, second)
        other.script_for = stops_after(other, 55)
        (live,) = client.gateway.dispatcher._live.values()

        await home.kill()
        await until(lambda: client.num_generated() == [55])

        assert live.losses.total == 1
        asked.cancel()


def stops_after(machine: Machine, num_tokens: int):
    """Return what has a machine tell so many tokens and nothing more."""

    def script_for(submit: pb.Submit) -> Script:
        script = machine._script_for(submit)
        script.texts, script.ending = script.texts[:num_tokens], asyncio.Event()
        return script

    return script_for


# -- what nothing is computed for ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "overrides", "resume", "field"),
    [
        (CHAT, {}, {"token_ids": []}, "evenflow.resume.token_ids"),
        (CHAT, {}, {"token_ids": [-1]}, "evenflow.resume.token_ids"),
        (CHAT, {}, {"token_ids": [1 << 40]}, "evenflow.resume.token_ids"),
        (CHAT, {}, {"token_ids": [5], "delivered": 2}, "evenflow.resume.delivered"),
        (CHAT, {}, {"token_ids": [5], "delivered": -1}, "evenflow.resume.delivered"),
        (CHAT, {}, {"delivered": 0}, "evenflow.resume.token_ids"),
        (CHAT, {"logprobs": True}, {"token_ids": [5], "delivered": 0}, "evenflow.resume.delivered"),
        (CHAT, {"n": 2}, {"token_ids": [5]}, "n"),
        (
            CHAT,
            {"stream": True, "evenflow": {"resumable": True}},
            {"token_ids": [5]},
            "evenflow.resumable",
        ),
        (COMPLETIONS, {"echo": True}, {"token_ids": [5]}, "echo"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, {"token_ids": [5]}, "prompt"),
    ],
)
async def test_bad_input_is_refused_by_name(
    path: str, overrides: Body, resume: Body, field: str
) -> None:
    machine = Machine()
    body = chat_body() if path == CHAT else {"model": MODEL, "prompt": "Once"}
    evenflow = overrides.get("evenflow", {})
    async with running(machine) as (client,):
        answer = await client.http.post(
            path, json=body | overrides | {"evenflow": evenflow | {"resume": resume}}
        )

        assert (answer.status_code, machine.submits) == (400, [])
    error = answer.json()["error"]
    assert error["param"].startswith(field)
    assert error["message"].startswith(field)


@pytest.mark.parametrize(
    ("resume", "more", "field"),
    [
        ({}, {}, "resume.token_ids"),
        ({"token_ids": [5, -1]}, {}, "resume.token_ids"),
        ({"token_ids": [5], "delivered": 2}, {}, "resume.delivered"),
        ({"token_ids": [5], "delivered": -1}, {}, "resume.delivered"),
        ({"token_ids": [5], "delivered": 0}, {"sampling": {"logprobs": 1}}, "resume.delivered"),
        ({"token_ids": [5]}, {"echo": True}, "echo"),
        ({"token_ids": [5]}, {"resumable": True}, "resumable"),
    ],
)
async def test_bad_input_over_grpc_is_refused_by_name(resume: Body, more: Body, field: str) -> None:
    machine = Machine()
    request = pb_gateway.GenerateRequest(model=MODEL, text="Once", resume=resume, **more)
    async with running(machine) as (client,):
        with pytest.raises(aio.AioRpcError) as caught:
            async for _ in pb_gateway_grpc.GatewayServiceStub(client.channel).Generate(request):
                pass

        assert machine.submits == []
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(field)


@pytest.mark.parametrize(
    ("code", "rejected_field"),
    [
        (pb.REJECT_CODE_INVALID_ARGUMENT, "resume.output_ids"),
        (pb.REJECT_CODE_CANNOT_RESUME, "resume"),
    ],
)
async def test_what_an_executor_refuses_of_the_ids_bears_the_clients_name(
    code: pb.RejectCode.ValueType, rejected_field: str
) -> None:
    message = f"{rejected_field}: no"
    first, second = Machine(0), Machine(1)
    reject = pb.Rejected(code=code, field=rejected_field, message=message)
    first.script_for = second.script_for = lambda _: Script(reject=reject)
    async with running(first, second) as (client,):
        answer = await client.http.post(CHAT, json=again(chat_body(), [5, 6]))

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "evenflow.resume.token_ids"
    assert error["message"].startswith("evenflow.resume.token_ids: ")
    assert "no" in error["message"]
    assert len(first.submits + second.submits) == 1  # all others would say the same


async def test_other_apis_which_tell_no_ids_take_none() -> None:
    async with running(Machine()) as (client,):
        answer = await client.http.post(
            "/v1/responses", json=again({"model": MODEL, "input": "Say hello."}, [5])
        )

    assert answer.status_code == 400
    assert "resume" in answer.json()["error"]["message"]


async def test_the_ids_given_count_as_the_prompt_does() -> None:
    machine = Machine()
    async with running(machine) as (client,):
        body = with_ids(stream_body())
        ids = ids_in(await events_of(client, CHAT, body))
        machine.takes.clear()
        counts = []
        for given in (1, 9):
            asked = asyncio.create_task(events_of(client, CHAT, again(body, ids[:given])))
            await until(lambda: bool(client.num_generated()))
            (live,) = client.gateway.dispatcher._live.values()
            counts.append(live.generation.num_tokens)
            asked.cancel()
            await client.wait_idle()
        machine.takes.set()

    # "Say hello." is 10 characters, at 4 a token: 2.
    assert counts == [2 + 1, 2 + 9]
