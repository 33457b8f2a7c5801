"""Live streams over real sockets: pacing, delivered counts, clients that leave."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import httpx
import pytest

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import generation_pb2 as gen
from services.gateway import app
from services.gateway.app import Gateway, run_gateway
from services.gateway.executors.outbox import DELIVERED_INTERVAL_S
from services.pacing.deposit import due_times_s
from tests.fake_executor import EVENT_TIMEOUT_S, MODEL, FakeExecutor, Script
from tests.gateways import (
    Client,
    chat_body,
    connect,
    gateway_for,
    make_settings,
    stream_body,
    until,
)
from tests.slow_reader import ask_and_wait


@asynccontextmanager
async def client_of_draining(
    executor: FakeExecutor, *, drain_timeout_s: float, **overrides: object
) -> AsyncIterator[tuple[Client, asyncio.Event]]:
    """Give a client of a gateway that begins to drain when the event is set."""
    leave, started = asyncio.Event(), asyncio.Future[Gateway]()

    async def run() -> None:
        settings = make_settings(executor, drain_timeout_s=drain_timeout_s, **overrides)
        async with run_gateway(settings) as gateway:
            started.set_result(gateway)
            await leave.wait()

    running = asyncio.create_task(run())
    async with connect(await started) as client:
        await client.wait_ready()
        yield client, leave
    await running


async def read_texts(response: httpx.Response) -> list[tuple[str, float]]:
    """Return each piece of text and when it came; fails on an error event."""
    loop = asyncio.get_running_loop()
    got = []
    async for line in response.aiter_lines():
        if not line.startswith("data: {"):  # an empty line, a comment, or the end
            continue
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        if text := event["choices"][0]["delta"].get("content"):
            got.append((text, loop.time()))
    return got


@pytest.mark.parametrize("tokens_per_step", [1, 4])
async def test_a_stated_rate_spaces_the_tokens(client, executor, tokens_per_step) -> None:
    """Each by itself, however many come together, as with drafts."""
    interval_s, num_tokens = 0.1, 12
    executor.script = Script(texts=["x"] * num_tokens, tokens_per_step=tokens_per_step)
    body = stream_body(evenflow={"consumption_rate_tps": 1 / interval_s, "pace_tail": True})

    asked_s = asyncio.get_running_loop().time()
    async with client.http.stream("POST", "/v1/chat/completions", json=body) as response:
        got = await read_texts(response)

    assert {text for text, _ in got} == {"x"}
    # All tokens are generated at once, and the k-th is due k intervals after the first.
    due_s = due_times_s([0.0] * num_tokens, interval_s)
    since_asked_s = [at_s - asked_s for _, at_s in got]
    assert all(at_s >= on_time_s for at_s, on_time_s in zip(since_asked_s, due_s, strict=True))


@pytest.mark.nightly
async def test_the_gaps_are_those_of_the_stated_rate(client, executor) -> None:
    interval_s = 0.1
    executor.script = Script(texts=["x"] * 12)
    body = stream_body(evenflow={"consumption_rate_tps": 1 / interval_s, "pace_tail": True})

    async with client.http.stream("POST", "/v1/chat/completions", json=body) as response:
        got = await read_texts(response)

    gaps_s = sorted(later - earlier for (_, earlier), (_, later) in pairwise(got))
    assert gaps_s[len(gaps_s) // 2] == pytest.approx(interval_s, abs=0.05)


@pytest.mark.parametrize("bound", ["slo_tbt_ms", "slo_tpot_ms"])
async def test_a_token_bound_paces_too(client, executor, bound) -> None:
    executor.script = Script(texts=["x"] * 4)
    body = stream_body(evenflow={bound: 100, "pace_tail": True})

    asked_s = asyncio.get_running_loop().time()
    async with client.http.stream("POST", "/v1/chat/completions", json=body) as response:
        got = await read_texts(response)

    assert len(got) == 4
    assert got[-1][1] - asked_s >= 0.3  # 3 intervals of 100 ms


@pytest.mark.parametrize(
    ("url", "asked", "is_text"),
    [
        ("/v1/responses", {"input": "Hi"}, '"response.output_text.delta"'),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
            '"text_delta"',
        ),
    ],
)
async def test_the_other_apis_are_paced_alike(client, executor, url, asked, is_text) -> None:
    executor.script = Script(texts=["x"] * 4)
    body = {"model": MODEL, "stream": True, **asked}
    body["evenflow"] = {"consumption_rate_tps": 10, "pace_tail": True}

    loop = asyncio.get_running_loop()
    asked_s = loop.time()
    async with client.http.stream("POST", url, json=body) as response:
        lines = response.aiter_lines()
        got_s = [loop.time() async for line in lines if line[:5] == "data:" and is_text in line]

    assert len(got_s) == 4
    assert got_s[-1] - asked_s >= 0.3  # 3 intervals of 100 ms


THOUGHTS = [pb.Token(reasoning="hm ")] * 500
CALL = pb.Token(tool_calls=[gen.ToolCallPart(index=0, id="c", name="f", arguments="{}")])


@pytest.mark.parametrize("is_told", [True, False])
async def test_thoughts_keep_no_word_back(client, executor, is_told) -> None:
    """500 of them at 8 tokens per second would take a minute."""
    thoughts = THOUGHTS if is_told else [pb.Token(not_read=True)] * 500
    executor.script = Script(texts=[*thoughts, *["x"] * 4])
    body = stream_body(evenflow={"consumption_rate_tps": 8, "pace_tail": True})

    asked_s = asyncio.get_running_loop().time()
    async with client.http.stream("POST", "/v1/chat/completions", json=body) as response:
        got = await read_texts(response)

    assert [text for text, _ in got] == ["x"] * 4
    assert got[0][1] - asked_s < 8.0  # a busy machine's
    assert got[-1][1] - got[0][1] >= 0.3  # 3 intervals of 125 ms, less what the first was late


async def test_text_before_a_call_does_not_keep_the_call_back(client, executor) -> None:
    executor.script = Script(texts=["x"] * 500 + [CALL])
    executor.script.ending.clear()  # what ends the answer would let all go
    body = stream_body(evenflow={"consumption_rate_tps": 1})

    async with client.http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if "tool_calls" in line:
                break
    executor.script.ending.set()


@pytest.mark.parametrize(("release", "least_s"), [("at_once", 0.0), ("smooth", 0.35)])
async def test_text_that_is_not_paced_goes_out_at_once_or_a_little_later(
    client, executor, release, least_s
) -> None:
    """By its pace the last token would be due after a minute."""
    executor.script = Script(texts=["x"] * 60)
    executor.script.ending.clear()  # what ends the answer would let all go
    body = stream_body(evenflow={"consumption_rate_tps": 1, "release": release})

    loop = asyncio.get_running_loop()
    async with client.http.stream("POST", "/v1/chat/completions", json=body) as response:
        asked_s, got = loop.time(), []
        async for line in response.aiter_lines():
            if '"x"' in line:
                got.append(loop.time() - asked_s)
            if len(got) == 60:
                break
    executor.script.ending.set()

    assert least_s <= got[-1] < 30.0  # a busy machine's
    assert executor.submits[0].service_level.consumption_rate_tps == 1


READ = {"consumption_rate_tps": 5.2, "release": gen.RELEASE_AT_ONCE}
TOOL = {"type": "function", "function": {"name": "f"}}
TURN = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("url", "body", "is_read"),
    [
        ("/v1/chat/completions", {"messages": TURN}, True),
        ("/v1/responses", {"input": "Hi"}, True),
        ("/v1/messages", {"messages": TURN, "max_tokens": 9}, True),
        ("/v1/completions", {"prompt": "Hi"}, False),
        ("/v1/chat/completions", {"messages": TURN, "tools": [TOOL]}, False),
        ("/v1/chat/completions", {"messages": TURN, "stream": False}, False),
        (
            "/v1/chat/completions",
            {"messages": TURN, "response_format": {"type": "json_object"}},
            False,
        ),
        ("/v1/chat/completions", {"messages": TURN, "evenflow": {"slo_tbt_ms": 90}}, False),
    ],
)
async def test_an_operator_says_how_fast_those_read_who_say_nothing(
    executor, url, body, is_read
) -> None:
    rates = {MODEL: 5.2}
    async with gateway_for(executor, default_reading_rate_tps=rates) as client:
        await client.wait_ready()
        await client.http.post(url, json={"model": MODEL, "stream": True} | body)

    (submit,) = executor.submits
    assert (submit.service_level == gen.ServiceLevel(**READ)) is is_read
    assert submit.service_level.HasField("consumption_rate_tps") is is_read


async def test_a_whole_answer_is_not_read_while_it_comes(client, executor) -> None:
    level = {"consumption_rate_tps": 5, "slo_ttft_ms": 500, "max_in_hand_s": 2}
    await client.http.post("/v1/chat/completions", json=chat_body(evenflow=level))

    assert executor.submits[0].service_level == gen.ServiceLevel(slo_ttft_s=0.5)


async def test_a_client_may_have_the_operator_s_rate_keep_text_back(executor) -> None:
    rates = {MODEL: 5.2}
    async with gateway_for(executor, default_reading_rate_tps=rates) as client:
        await client.wait_ready()
        body = stream_body(evenflow={"release": "paced"})
        await client.http.post("/v1/chat/completions", json=body)

    level = executor.submits[0].service_level
    assert (level.consumption_rate_tps, level.release) == (5.2, gen.RELEASE_PACED)


async def test_without_a_rate_nothing_waits_for_the_clock(client, executor) -> None:
    executor.script = Script(texts=["x"] * 500)

    async with client.http.stream("POST", "/v1/chat/completions", json=stream_body()) as response:
        got = await read_texts(response)

    assert len(got) == 500
    assert client.gateway.pacer._heads == []


async def test_a_whole_answer_is_not_paced(client, executor) -> None:
    executor.script = Script(texts=["x"] * 500)
    body = chat_body(evenflow={"slo_tbt_ms": 3_600_000, "pace_tail": True})

    response = await client.http.post("/v1/chat/completions", json=body)

    assert response.json()["choices"][0]["message"]["content"] == "x" * 500


async def test_the_end_of_generation_releases_what_was_held(client, executor) -> None:
    executor.script = Script(texts=["x"] * 500)
    body = stream_body(evenflow={"slo_tbt_ms": 3_600_000})

    async with client.http.stream("POST", "/v1/chat/completions", json=body) as response:
        got = await read_texts(response)

    assert len(got) == 500


async def test_a_paced_tail_gives_its_place_back_in_time(executor) -> None:
    executor.script = Script(texts=["x"] * 3)
    executor.script.ending.clear()
    async with gateway_for(executor, max_live_requests=4, max_pace_tail_s=0.2) as client:
        await client.wait_ready()
        body = stream_body(n=4, evenflow={"slo_tbt_ms": 3_600_000, "pace_tail": True})
        async with client.http.stream("POST", "/v1/chat/completions", json=body) as response:
            refused = await client.http.post("/v1/chat/completions", json=chat_body())
            executor.script.ending.set()
            texts = await read_texts(response)
        taken = await client.http.post("/v1/chat/completions", json=chat_body())

    assert len(texts) == 12
    assert (refused.status_code, taken.status_code) == (429, 200)


async def test_streams_that_only_keep_their_pace_make_room_for_others(executor) -> None:
    """As many of them as places are wanted: for each newcomer, and one of sixteen to spare."""
    executor.script = Script(texts=["x"] * 3)
    async with gateway_for(executor, max_live_requests=16) as client:
        await client.wait_ready()
        dispatcher = client.gateway.dispatcher
        body = stream_body(n=16, evenflow={"slo_tbt_ms": 3_600_000, "pace_tail": True})
        async with client.http.stream("POST", "/v1/chat/completions", json=body) as response:
            reading = asyncio.create_task(read_texts(response))
            await until(
                lambda: all(one.generation.keeps_its_pace for one in dispatcher.live_requests())
            )

            refused = await client.http.post("/v1/chat/completions", json=chat_body())
            await until(lambda: dispatcher.num_live == 14)
            taken = await client.http.post("/v1/chat/completions", json=chat_body())
            num_left = dispatcher.num_live
            reading.cancel()
            await asyncio.wait([reading])

    assert (refused.status_code, taken.status_code, num_left) == (429, 200, 14)


async def test_a_hundred_and_fifty_paced_streams_lose_nothing(client, executor) -> None:
    texts = [f"<{k}>" for k in range(40)]
    executor.script = Script(texts=texts, interval_s=0.002)
    body = stream_body(evenflow={"consumption_rate_tps": 40, "pace_tail": True})

    async def one() -> str:
        async with client.http.stream("POST", "/v1/chat/completions", json=body) as response:
            return "".join(text for text, _ in await read_texts(response))

    answers = await asyncio.gather(*(one() for _ in range(150)))

    assert answers == ["".join(texts)] * 150
    await client.wait_idle()


async def test_delivered_counts_come_back_in_batches(client, executor) -> None:
    executor.script = Script(texts=["x"] * 60, interval_s=0.005)
    executor.script.ending.clear()
    ids = [f"r{k}" for k in range(5)]
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    streams = [
        asyncio.create_task(
            client.http.post(
                "/v1/chat/completions", json=stream_body(), headers={"x-request-id": name}
            )
        )
        for name in ids
    ]

    await executor.until(lambda: executor.delivered == dict.fromkeys(ids, 60))
    elapsed_s = loop.time() - began_s
    executor.script.ending.set()
    await asyncio.gather(*streams)

    assert len(executor.delivered_messages) <= elapsed_s / DELIVERED_INTERVAL_S + 1


async def test_tokens_held_back_are_not_delivered(client, executor) -> None:
    executor.script = Script(texts=["x"] * 5)
    executor.script.ending.clear()
    body = stream_body(evenflow={"slo_tbt_ms": 3_600_000})

    async with client.http.stream(
        "POST", "/v1/chat/completions", json=body, headers={"x-request-id": "held"}
    ):
        await executor.until(lambda: "held" in executor.delivered)
        assert executor.delivered["held"] == 1


LEAVING = {
    "before-acceptance": "accepting",
    "in-prefill": "generating",
    "mid-stream": "ending",
}


@pytest.mark.parametrize("gate", LEAVING.values(), ids=LEAVING)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_has_its_request_aborted(client, executor, gate, stream) -> None:
    getattr(executor.script, gate).clear()
    request = asyncio.create_task(
        client.http.post(
            "/v1/chat/completions",
            json=chat_body(stream=stream),
            headers={"x-request-id": "gone"},
        )
    )
    await executor.until(lambda: len(executor.submits) == 1)
    if gate == "ending":
        await executor.until(lambda: executor.delivered.get("gone", 0) == 3)
    assert executor.aborted == []

    request.cancel()  # closes the socket

    await executor.until(lambda: executor.aborted == ["gone"])
    await client.wait_idle()
    client.gateway.pacer.check_integrity()


async def test_a_client_that_leaves_while_tokens_are_held_back_is_noticed(client, executor) -> None:
    executor.script.ending.clear()
    body = stream_body(evenflow={"slo_tbt_ms": 3_600_000})
    async with client.http.stream(
        "POST", "/v1/chat/completions", json=body, headers={"x-request-id": "gone"}
    ) as response:
        await anext(response.aiter_bytes())

    await executor.until(lambda: executor.aborted == ["gone"])
    await client.wait_idle()
    client.gateway.pacer.check_integrity()


async def test_a_finished_request_is_not_aborted(client, executor) -> None:
    for stream in (True, False):
        await client.http.post("/v1/chat/completions", json=chat_body(stream=stream))

    assert executor.aborted == []


async def test_a_gateway_that_leaves_serves_on_until_load_balancers_have_noticed(
    executor, monkeypatch
) -> None:
    noticed, times_s = asyncio.Event(), []

    async def lame_duck(lame_duck_s: float) -> None:
        times_s.append(lame_duck_s)
        await noticed.wait()

    monkeypatch.setattr(app, "sleep", lame_duck)
    async with client_of_draining(executor, drain_timeout_s=30.0, lame_duck_s=7.0) as (
        client,
        leave,
    ):
        before = await client.http.post("/v1/chat/completions", json=chat_body())
        leave.set()
        await until(lambda: not client.gateway.dispatcher.is_ready)
        ready = await client.http.get("/ready")
        served = await client.http.post("/v1/chat/completions", json=chat_body())
        noticed.set()
        await until(lambda: client.gateway.dispatcher._is_draining)

    assert times_s == [7.0]
    assert (before.status_code, ready.status_code, served.status_code) == (200, 503, 200)
    assert "connection" not in before.headers
    assert (ready.headers["connection"], served.headers["connection"]) == ("close", "close")


async def test_a_drain_lets_streams_end_and_refuses_new_ones(executor) -> None:
    executor.script.ending.clear()
    async with client_of_draining(executor, drain_timeout_s=30.0) as (client, leave):
        stream = asyncio.create_task(
            client.http.post(
                "/v1/chat/completions", json=stream_body(), headers={"x-request-id": "last"}
            )
        )
        await executor.until(lambda: executor.delivered.get("last", 0) == 3)
        leave.set()
        await until(lambda: not client.gateway.dispatcher.is_ready)
        ready = await client.http.get("/ready")
        refused = await client.http.post("/v1/chat/completions", json=chat_body())
        executor.script.ending.set()
        answer = await stream

    assert (ready.status_code, refused.status_code) == (503, 503)
    assert refused.json()["error"]["code"] == "unavailable"
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_a_drain_that_takes_too_long_ends_streams_with_an_error(executor) -> None:
    executor.script.ending.clear()
    async with client_of_draining(executor, drain_timeout_s=0.1) as (client, leave):
        stream = asyncio.create_task(
            client.http.post(
                "/v1/chat/completions",
                json=stream_body(evenflow={"slo_tbt_ms": 3_600_000}),
                headers={"x-request-id": "last"},
            )
        )
        await executor.until(lambda: executor.delivered.get("last", 0) == 1)
        await until(lambda: client.num_generated() == [3])
        leave.set()
        answer = await stream
        await executor.until(lambda: executor.aborted == ["last"])

    *_, held_back, last = answer.text.strip().split("\n\n")
    assert " world" in held_back  # what was generated goes out first
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"


KEEPALIVE = ": keep-alive"


async def test_a_silent_stream_is_kept_alive_by_comments(executor) -> None:
    executor.script.generating.clear()  # as during a long prefill
    async with gateway_for(executor, sse_keepalive_s=0.05) as client:
        await client.wait_ready()
        async with client.http.stream(
            "POST", "/v1/chat/completions", json=stream_body()
        ) as response:
            lines = response.aiter_lines()
            first = [await anext(lines) for _ in range(4)]
            executor.script.generating.set()
            rest = [line async for line in lines]

    assert first == [KEEPALIVE, "", KEEPALIVE, ""]
    # Comments aside, the stream is the one that it would have been.
    events = [line for line in rest if line and line != KEEPALIVE]
    assert len(events) == 6  # the role, three tokens, the reason and the end
    assert events[-1] == "data: [DONE]"


async def test_without_an_interval_nothing_keeps_a_stream_alive(executor) -> None:
    executor.script.generating.clear()
    async with gateway_for(executor, sse_keepalive_s=0) as client:
        await client.wait_ready()
        answer = asyncio.create_task(client.http.post("/v1/chat/completions", json=stream_body()))
        await executor.until(lambda: len(executor.submits) == 1)
        await asyncio.sleep(0.2)  # a comment per turn of the loop would be seen by now
        executor.script.generating.set()
        text = (await answer).text

    assert text.startswith("data: ")
    assert KEEPALIVE not in text


async def test_a_reader_behind_gets_several_tokens_in_one_event(client, executor) -> None:
    texts = [f"{k:03d}" + "x" * 50_000 for k in range(200)]  # more than any buffer takes
    executor.script = Script(texts=texts)
    port = client.gateway.http_port
    async with ask_and_wait(port, stream_body(), request_id="behind") as reader:
        await until(lambda: client.num_generated() == [len(texts)])  # the socket is full by now
        events = await reader.rest(EVENT_TIMEOUT_S)

    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(pieces) == "".join(texts)
    assert len([piece for piece in pieces if piece]) < len(texts)
