"""Streams that their readers take up again: what they get in all is what they would have got.

The machines' k-th token is a function of prompt, seed and k (`tests/machine.py`).
"""

import asyncio
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import openai
import pytest

from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from services.gateway.resumable.stream import ResumableStream
from services.gateway.types import RequestId
from tests.coming_back import Reading, by_answer, event_id, without_moves, without_times
from tests.fake_executor import MODEL, FakeExecutor, Script
from tests.gateways import Client, chat_body, gateway_with, stream_body, until
from tests.machine import NUM_TOKENS, Machine

EXAMPLE = Path(__file__).parents[2] / "examples" / "resume.py"
CHAT = "/v1/chat/completions"
ALL = 1 << 30
SEED = 20_261_128
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
RESUMABLE = {"resumable": True}
PACED = {**RESUMABLE, "consumption_rate_tps": 500, "pace_tail": True}
FORMS = {
    "chat": (CHAT, stream_body(evenflow=PACED)),
    "chat-tools-ids": (CHAT, stream_body(evenflow=PACED, tools=[TOOL], return_token_ids=True)),
    "chat-likely-usage": (
        CHAT,
        stream_body(
            evenflow=PACED,
            logprobs=True,
            top_logprobs=2,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        ),
    ),
    "chat-n": (CHAT, stream_body(evenflow=PACED, n=3, seed=1)),
    "completions": (
        "/v1/completions",
        {
            "model": MODEL,
            "prompt": ["Once", "Twice"],
            "echo": True,
            "logprobs": 1,
            "max_tokens": NUM_TOKENS,
            "stream": True,
            "evenflow": PACED,
        },
    ),
    "responses": (
        "/v1/responses",
        {"model": MODEL, "input": "Say hello.", "stream": True, "evenflow": PACED},
    ),
    "messages": (
        "/v1/messages",
        {
            "model": MODEL,
            "messages": chat_body()["messages"],
            "max_tokens": NUM_TOKENS,
            "stream": True,
            "evenflow": PACED,
        },
    ),
}
each_form = pytest.mark.parametrize("form", FORMS)


def stream_of(client: Client, request_id: str) -> ResumableStream:
    return client.gateway.streams.named(RequestId(request_id))


async def left(client: Client, request_id: str) -> ResumableStream:
    """Wait until the gateway knows that a stream's reader has left."""
    stream = stream_of(client, request_id)
    await until(lambda: stream._was_read and stream.is_detached)
    return stream


async def left_midway(client: Client) -> Reading:
    """Return a reader of two answers that has left after one event."""
    reading = Reading(client, "r")
    await reading.begin(CHAT, stream_body(evenflow=RESUMABLE, n=2), 1)
    await left(client, "r")
    return reading


def error_of(answer: httpx.Response) -> dict[str, str]:
    return answer.json()["error"]


async def get(client: Client, request_id: str, last_event_id: str = "") -> httpx.Response:
    headers = {"last-event-id": last_event_id} if last_event_id else {}
    return await client.http.get(f"/v1/streams/{request_id}", headers=headers)


# -- what comes is what would have come ----------------------------------------------------------


@each_form
async def test_what_is_read_in_pieces_is_the_whole_byte_for_byte(form: str) -> None:
    path, body = FORMS[form]
    draws = random.Random(f"{SEED} {form}")
    async with gateway_with(Machine()) as client:
        uncut = Reading(client, "r")
        await uncut.begin(path, body, ALL)
        written_again = (await get(client, "r")).content
        readings = []
        for _ in range(4):
            reading = Reading(client, "r")
            await reading.begin(path, body, draws.randint(0, 5))
            await reading.finish(draws, most=5)
            readings.append((reading, (await get(client, "r")).content))
        await client.wait_idle()

    assert written_again == uncut.text
    for reading, whole in readings:
        assert reading.num_cuts > 3
        assert reading.text == whole
        assert by_answer(reading.text) == by_answer(uncut.text)
        if "n" not in body and not isinstance(body.get("prompt"), list):
            assert without_times(reading.text) == without_times(uncut.text)


@each_form
async def test_a_stream_can_be_joined_behind_each_of_its_events(form: str) -> None:
    path, body = FORMS[form]
    async with gateway_with(Machine()) as client:
        uncut = Reading(client, "r")
        await uncut.begin(path, body, ALL)
        ids = [event_id(event) for event in uncut.events]
        rests = [await get(client, "r", one) for one in ids]

    assert len(set(ids)) == len(ids)
    assert [rest.content for rest in rests] == [
        b"".join(uncut.events[k:]) for k in range(1, len(ids) + 1)
    ]
    assert [rest.status_code for rest in rests] == [200] * (len(ids) - 1) + [204]


@each_form
async def test_events_are_those_of_a_stream_that_is_not_resumable_with_ids(form: str) -> None:
    path, body = FORMS[form]
    plain = {**body, "evenflow": {"consumption_rate_tps": 500}}
    async with gateway_with(Machine()) as client:
        uncut = Reading(client, "r")
        await uncut.begin(path, body, ALL)
        answer = await client.http.post(path, json=plain, headers={"x-request-id": "r"})

    assert by_answer(uncut.text) == by_answer(answer.content)


async def test_an_id_says_how_many_tokens_of_each_answer_there_are() -> None:
    executor = FakeExecutor()
    executor.script = Script(texts=["a", "b", "c"])
    body = stream_body(evenflow=RESUMABLE)
    async with gateway_with(executor) as client:
        one, three = Reading(client, "r"), Reading(client, "r3")
        await one.begin(CHAT, body, ALL)
        await three.begin(CHAT, body | {"n": 3}, ALL)

    # The role before the first token, and after the last one the finish reason and [DONE].
    ids = ["r/0+1", "r/1", "r/2", "r/3", "r/3+1", "r/3+2"]
    assert [event_id(event) for event in one.events] == ids
    assert three.last_event_id.startswith("r3/3.3.3+")


async def test_the_example_prints_the_whole_answer_over_connections_that_break() -> None:
    executor = FakeExecutor()
    executor.script = Script(texts=[f"{k} " for k in range(10)])
    async with gateway_with(executor) as client:
        asked = ["Count.", "--base-url", f"{client.base_url}/v1", "--break-after", "4"]
        example = await asyncio.create_subprocess_exec(
            sys.executable, EXAMPLE, *asked, stdout=subprocess.PIPE
        )
        printed, _ = await example.communicate()

    assert printed.decode() == "".join(f"{k} " for k in range(10)) + "\n"
    assert [submit.sampling.max_tokens for submit in executor.submits] == [300]


# -- while nobody reads --------------------------------------------------------------------------


@each_form
async def test_a_stream_goes_on_whose_executor_dies_while_nobody_reads(form: str) -> None:
    path, body = FORMS[form]
    first, second = Machine(0), Machine(1)
    async with gateway_with(first, second) as client:
        uncut = Reading(client, "r")
        await uncut.begin(path, body, ALL)
        for machine in (first, second):
            machine.goes_on.clear()
            machine.submits.clear()
        reading = Reading(client, "r")
        await reading.begin(path, body, 4)
        await left(client, "r")
        await until(lambda: set(client.num_generated()) == {NUM_TOKENS // 2})
        dying, living = (first, second) if first.submits else (second, first)
        await dying.kill()
        await until(lambda: bool(living.resumed))
        living.goes_on.set()
        await reading.go_on(ALL)

    assert by_answer(without_moves(reading.text)) == by_answer(uncut.text)
    assert reading.num_cuts == 1


async def test_generation_is_held_while_nobody_reads_and_goes_on_with_the_next_reader() -> None:
    executor = FakeExecutor()
    executor.script = Script(texts=[f"{k} " for k in range(100)])
    executor.script.midway.clear()
    async with gateway_with(executor, max_undelivered_tokens=8) as client:
        reading = Reading(client, "r")
        await reading.begin(CHAT, stream_body(evenflow=RESUMABLE), 10)
        await left(client, "r")
        executor.script.midway.set()
        await executor.until(lambda: ("r", True) in executor.holds)
        await reading.go_on(ALL)
        await executor.until(lambda: executor.holds[-1] == ("r", False))

    assert b"99 " in reading.text
    assert executor.aborted == []


async def test_pace_goes_on_while_nobody_reads() -> None:
    """What is due meanwhile comes at once."""
    executor = FakeExecutor()
    executor.script = Script(texts=[f"{k} " for k in range(20)])
    executor.script.midway.clear()
    body = stream_body(evenflow={**RESUMABLE, "consumption_rate_tps": 50, "pace_tail": True})
    async with gateway_with(executor) as client:
        reading = Reading(client, "r")
        await reading.begin(CHAT, body, 2)
        await left(client, "r")
        executor.script.midway.set()
        await client.wait_idle()  # the gateway keeps the rest as soon as all of it is due
        num_steps = stream_of(client, "r").num_steps
        await reading.go_on(ALL)

    assert num_steps == 21
    assert b"19 " in reading.text


async def test_an_answer_that_has_ended_takes_no_place_while_nobody_reads() -> None:
    executor = FakeExecutor()
    executor.script.midway.clear()
    async with gateway_with(executor) as client:
        reading = await left_midway(client)
        executor.script.midway.set()
        await client.wait_idle()
        await reading.go_on(ALL)
        whole = await get(client, "r")

    assert reading.text == whole.content
    assert executor.aborted == []


async def test_a_stream_that_is_not_resumable_ends_with_its_reader() -> None:
    executor = FakeExecutor()
    executor.script.midway.clear()
    async with gateway_with(executor) as client:
        reading = Reading(client, "r")
        await reading.begin(CHAT, stream_body(), 0)
        await executor.until(lambda: executor.aborted == ["r"])
        answer = await get(client, "r")

    assert answer.status_code == 404


async def test_a_second_reader_supersedes_the_first() -> None:
    executor = FakeExecutor()
    executor.script.midway.clear()
    async with gateway_with(executor) as client:
        first, second = Reading(client, "r"), Reading(client, "r")
        body = stream_body(evenflow=RESUMABLE)
        beginning = asyncio.create_task(first.begin(CHAT, body, ALL))
        await until(lambda: len(first.events) == 2)
        going_on = asyncio.create_task(second.go_on(ALL))
        await beginning  # its response ends
        await until(lambda: len(second.events) == 2)
        executor.script.midway.set()
        await going_on
        whole = await get(client, "r")

    assert second.text == whole.content
    assert first.events == second.events[:2]


async def test_a_reader_who_stops_reading_has_left() -> None:
    """Its connection is there still; its stream is another reader's to take up."""
    executor = FakeExecutor()
    texts = ["x" * 65_536] * 200
    script = executor.script = Script(texts=texts)
    script.ending.clear()
    async with gateway_with(executor, reader_timeout_s=2.0) as client:
        body, headers = stream_body(evenflow=RESUMABLE), {"x-request-id": "r"}
        async with client.http.stream("POST", CHAT, json=body, headers=headers) as answer:
            assert answer.status_code == 200
            stream = await left(client, "r")
            (generation,) = stream.generations
            stopped_s = generation.reader_stopped_for_s(math.inf)
            script.ending.set()
            whole = await get(client, "r")

    assert stopped_s == 0.0  # the next reader begins anew
    assert whole.content.count(b"x" * 65_536) == len(texts)


@pytest.mark.logs("stream_failed")
async def test_a_failure_while_nobody_reads_is_told_and_told_again() -> None:
    only = Machine()
    only.goes_on.clear()
    async with gateway_with(only, failover_timeout_s=0.0) as client:
        reading = Reading(client, "r")
        await reading.begin(CHAT, stream_body(evenflow=RESUMABLE), 2)
        await left(client, "r")
        await only.kill()
        await reading.go_on(ALL)
        again = await get(client, "r")
        await client.wait_idle()

    assert b"executor_lost" in reading.events[-1]
    assert again.content == reading.text


async def test_a_cancelled_stream_ends_for_the_next_reader() -> None:
    executor = FakeExecutor()
    executor.script.midway.clear()
    async with gateway_with(executor) as client:
        reading = await left_midway(client)
        client.gateway.dispatcher.cancel(RequestId("r"))
        await reading.go_on(ALL)
        await client.wait_idle()

    assert b"the request was cancelled" in reading.events[-1]


# -- what is not kept ----------------------------------------------------------------------------


async def begun_and_left(client: Client, name: str, num_events: int = 2) -> Reading:
    reading = Reading(client, name)
    await reading.begin(CHAT, stream_body(evenflow=RESUMABLE), num_events)
    await left(client, name)
    return reading


@pytest.mark.logs("stream_let_go")
async def test_a_stream_whose_reader_stays_away_is_given_up() -> None:
    executor = FakeExecutor()
    executor.script.midway.clear()
    async with gateway_with(executor) as client:
        await begun_and_left(client, "r")
        stream_of(client, "r").left_s -= 61
        client.gateway.streams.look_over()
        await executor.until(lambda: executor.aborted == ["r"])
        answer = await get(client, "r")
        await client.wait_idle()

    assert answer.status_code == 410
    assert error_of(answer)["code"] == "stream_gone"
    assert "send its request again" in error_of(answer)["message"]


async def test_where_memory_runs_out_those_go_first_that_were_left_first() -> None:
    executor = FakeExecutor()
    executor.script = Script(texts=[f"{k} " for k in range(1_900)])  # half a megabyte
    executor.script.ending.clear()
    async with gateway_with(
        executor, resume_max_bytes=1 << 20, max_undelivered_tokens=ALL
    ) as client:
        reading = Reading(client, "read")
        body = stream_body(evenflow=RESUMABLE)
        being_read = asyncio.create_task(reading.begin(CHAT, body, ALL))
        await until(lambda: len(reading.events) > 1_800)
        for name in ("a", "b"):
            await begun_and_left(client, name)
        await until(lambda: len(client.gateway.streams._streams) == 2)
        statuses = [(await client.http.head(f"/v1/streams/{name}")).status_code for name in "ab"]
        executor.script.ending.set()
        await being_read

    assert statuses == [410, 200]
    assert reading.events[-1].endswith(b"data: [DONE]\n\n")


async def test_a_reader_whose_stream_is_not_kept_any_more_has_the_rest_of_it() -> None:
    executor = FakeExecutor()
    executor.script = Script(texts=[f"{k} " for k in range(6_000)])
    executor.script.midway.clear()
    async with gateway_with(executor, resume_max_bytes=1 << 20) as client:
        reading = Reading(client, "r")
        body = stream_body(evenflow=RESUMABLE)
        being_read = asyncio.create_task(reading.begin(CHAT, body, ALL))
        await until(lambda: len(reading.events) > 2_900)
        executor.script.midway.set()
        await until(lambda: client.num_generated() == [6_000] or being_read.done())
        client.gateway.streams.look_over()
        await being_read
        answer = await get(client, "r")

    assert b"5999 " in reading.text
    assert answer.status_code == 410


async def test_a_key_takes_half_of_the_memory_and_finds_its_own_streams_only(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'[[keys]]\nname = "{name}"\nkey = "{name * 16}"\n' for name in "ab"))
    executor = FakeExecutor()
    executor.script = Script(texts=[f"{k} " for k in range(1_100)])  # 3/11 of a megabyte
    executor.script.ending.clear()
    settings = {"api_keys_file": keys, "max_undelivered_tokens": ALL, "resume_max_bytes": 1 << 20}
    async with gateway_with(executor, **settings) as client:
        statuses, kept = {}, client.gateway.streams._streams
        for key, name in (("a", "one"), ("b", "one"), ("a", "two")):
            client.http.headers["authorization"] = f"Bearer {key * 16}"
            reading = Reading(client, name)
            await reading.begin(CHAT, stream_body(evenflow=RESUMABLE), 2)
            await until(lambda: all(one.is_detached for one in kept.values()))
        await until(lambda: len(kept) == 2)
        for key in "ab":
            client.http.headers["authorization"] = f"Bearer {key * 16}"
            for name in ("one", "two"):
                answer = await client.http.head(f"/v1/streams/{name}")
                statuses[key, name] = answer.status_code

    assert statuses == {("a", "one"): 410, ("a", "two"): 200, ("b", "one"): 200, ("b", "two"): 404}


# -- what is no place in a stream ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        ("17", "must be the id of an event"),
        ("r/x", "must be the id of an event"),
        ("r/" + "1" * 4_000, "must be the id of an event"),
        ("other/1", "is of another request"),
        ("r/4", "is of no event that was sent"),
        ("r/1.1", "is of no event that was sent"),
        ("r/3+3", "is of no event that was sent"),
    ],
)
@pytest.mark.parametrize("place", ["Last-Event-ID", "starting_after"])
async def test_what_is_no_place_in_the_stream_is_named(stated: str, why: str, place: str) -> None:
    async with gateway_with(FakeExecutor()) as client:
        await Reading(client, "r").begin(CHAT, stream_body(evenflow=RESUMABLE), ALL)
        asked: dict[str, dict[str, str]] = {"headers": {}, "params": {}}
        asked["headers" if place == "Last-Event-ID" else "params"][place] = stated
        answer = await client.http.get("/v1/streams/r", **asked)

    assert answer.status_code == 400
    assert error_of(answer)["param"] == place
    assert error_of(answer)["message"] == f"{place}: {why}" or why in error_of(answer)["message"]


async def test_a_parameter_does_what_the_header_does_and_the_header_wins() -> None:
    async with gateway_with(FakeExecutor()) as client:
        uncut = Reading(client, "r")
        await uncut.begin(CHAT, stream_body(evenflow=RESUMABLE), ALL)
        by_parameter = await client.http.get("/v1/streams/r", params={"starting_after": "r/2"})
        by_both = await client.http.get(
            "/v1/streams/r", params={"starting_after": "r/1"}, headers={"last-event-id": "r/2"}
        )

    assert by_parameter.content == by_both.content == b"".join(uncut.events[3:])


async def test_a_stream_that_never_was_is_not_found() -> None:
    async with gateway_with(FakeExecutor()) as client:
        answer = await get(client, "r", "r/1")

    assert answer.status_code == 404
    assert error_of(answer)["code"] == "unknown_request"


@each_form
async def test_what_is_no_stream_cannot_be_resumable(form: str) -> None:
    path, body = FORMS[form]
    executor = FakeExecutor()
    whole = {name: value for name, value in body.items() if name != "stream_options"}
    async with gateway_with(executor) as client:
        answer = await client.http.post(path, json=whole | {"stream": False})

    assert answer.status_code == 400
    assert error_of(answer)["message"] == "evenflow.resumable: only allowed with stream"
    assert executor.submits == []


async def test_what_an_executor_refuses_is_no_stream() -> None:
    executor = FakeExecutor()
    async with gateway_with(executor) as client:
        body = stream_body(evenflow=RESUMABLE, model="no-such-model")
        answer = await client.http.post(CHAT, json=body, headers={"x-request-id": "r"})
        again = await get(client, "r")

    assert (answer.status_code, again.status_code) == (404, 404)
    assert json.loads(answer.content)["error"]["code"] == "model_not_found"


# -- responses -----------------------------------------------------------------------------------


async def test_the_sdk_goes_on_behind_each_event_of_a_response() -> None:
    draws = random.Random(SEED)
    async with (
        gateway_with(Machine()) as client,
        openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="unused") as sdk,
    ):
        uncut = await sdk.responses.create(
            model=MODEL,
            input="Say hello.",
            stream=True,
            background=True,
            store=True,
            extra_body={"evenflow": PACED},
            extra_headers={"x-request-id": "r"},
        )
        expected = [event async for event in uncut]
        events = [expected[0]]
        response_id = expected[0].response.id
        while len(events) < len(expected):
            at, most = events[-1].sequence_number, draws.randint(1, 5)
            async with await sdk.responses.retrieve(
                response_id, stream=True, starting_after=at
            ) as rest:
                number = 0
                async for event in rest:
                    events.append(event)
                    number += 1
                    if number == most:
                        break
        at = events[-1].sequence_number
        path = f"/v1/responses/{response_id}"
        nothing = await client.http.get(path, params={"stream": "true", "starting_after": at})

    assert events == expected
    assert (expected[-1].response.background, expected[-1].response.store) == (True, True)
    assert nothing.status_code == 204


BACKGROUND = {
    "model": MODEL,
    "input": "Say hello.",
    "stream": True,
    "background": True,
    "evenflow": RESUMABLE,
}


async def kept(client: Client) -> "asyncio.Task[None]":
    """Have a background response kept that its reader has left; return what does it."""
    stream = await left(client, "r")
    keeping = asyncio.create_task(stream.keep_rest())
    await asyncio.sleep(0)
    assert stream._readings  # of this one, or of the gateway's own look
    return keeping


async def test_a_background_response_comes_to_its_end_without_a_reader() -> None:
    executor = FakeExecutor()
    executor.script = Script(texts=[f"{k} " for k in range(100)])
    executor.script.midway.clear()
    async with gateway_with(executor, max_undelivered_tokens=8) as client:
        reading = Reading(client, "r")
        await reading.begin("/v1/responses", BACKGROUND, 10)
        superseded = await kept(client)
        await reading.go_on(5)
        await superseded
        keeping = await kept(client)
        stream = stream_of(client, "r")
        stream.left_s -= 61  # and it has not come to its end
        client.gateway.streams.look_over()
        assert stream_of(client, "r") is stream
        executor.script.midway.set()
        await client.wait_idle()
        await keeping
        await until(lambda: stream.is_over)
        await reading.go_on(ALL)
        whole = await get(client, "r")
        await left(client, "r")
        stream.left_s -= 61
        client.gateway.streams.look_over()
        late = await get(client, "r")

    assert b"99 " in reading.text
    assert reading.text == whole.content
    assert reading.num_cuts == 2
    assert executor.aborted == []
    assert late.status_code == 410


async def test_a_background_response_is_let_go_of_where_memory_runs_out() -> None:
    executor = FakeExecutor()
    executor.script = Script(texts=[f"{k} " for k in range(6_000)])
    executor.script.midway.clear()
    executor.script.ending.clear()
    async with gateway_with(executor, resume_max_bytes=1 << 20) as client:
        await Reading(client, "r").begin("/v1/responses", BACKGROUND, 10)
        keeping = await kept(client)
        executor.script.midway.set()
        await executor.until(lambda: executor.aborted == ["r"])
        await keeping
        await client.wait_idle()
        answer = await get(client, "r")

    assert answer.status_code == 410


@pytest.mark.parametrize(
    ("name", "asked", "status", "param"),
    [
        ("resp_r", {}, 400, "stream"),
        ("resp_r", {"stream": "false"}, 400, "stream"),
        ("resp_r", {"stream": "true", "starting_after": "-1"}, 400, "starting_after"),
        ("resp_r", {"stream": "true", "starting_after": "r/1"}, 400, "starting_after"),
        ("resp_r", {"stream": "true", "starting_after": "10000"}, 400, "starting_after"),
        ("resp_r", {"stream": "true", "starting_after": "1" * 5_000}, 400, "starting_after"),
        ("r", {"stream": "true"}, 404, None),
        ("resp_other", {"stream": "true"}, 404, None),
        ("resp_chat", {"stream": "true"}, 404, None),
    ],
)
async def test_what_is_no_place_in_a_response_is_named(name, asked, status, param) -> None:
    path, body = FORMS["responses"]
    async with gateway_with(Machine()) as client:
        await Reading(client, "r").begin(path, body, ALL)
        await Reading(client, "chat").begin(CHAT, stream_body(evenflow=RESUMABLE), ALL)
        answer = await client.http.get(f"/v1/responses/{name}", params=asked)

    assert (answer.status_code, error_of(answer)["param"]) == (status, param)


@pytest.mark.parametrize("name", ["store", "background"])
async def test_what_is_not_resumable_is_not_kept(name: str) -> None:
    body = {"model": MODEL, "input": "Say hello.", "stream": True, name: True}
    executor = FakeExecutor()
    async with gateway_with(executor) as client:
        answer = await client.http.post("/v1/responses", json=body)

    assert (answer.status_code, error_of(answer)["param"]) == (400, name)
    assert executor.submits == []


# -- over gRPC -----------------------------------------------------------------------------------

GENERATE = pb.GenerateRequest(
    model=MODEL,
    text="Once",
    echo=True,
    returns_prompt_ids=True,
    sampling=gen.SamplingParams(logprobs=2, max_tokens=NUM_TOKENS),
    service_level=gen.ServiceLevel(consumption_rate_tps=500, pace_tail=True),
    resumable=True,
)
CONVERSATION = pb.ChatRequest(
    model=MODEL,
    messages=[gen.ChatMessage(role="user", content="Say hello.")],
    returns_prompt_ids=True,
    service_level=gen.ServiceLevel(consumption_rate_tps=500, pace_tail=True),
    resumable=True,
)


def stub_of(client: Client) -> pb_grpc.GatewayServiceStub:
    return pb_grpc.GatewayServiceStub(client.channel)


def begin_call(client: Client, request: pb.GenerateRequest | pb.ChatRequest):
    stub = stub_of(client)
    asked = stub.Chat if isinstance(request, pb.ChatRequest) else stub.Generate
    return asked(request, metadata=[("x-request-id", "r")])


async def take(call, whole: pb.AttachResponse, most: int) -> bool:
    """Take so many tokens more, what comes after them being lost; returns whether that was all."""
    room = most
    async for part in call:
        if not room:
            call.cancel()
            return False
        del part.tokens[room:]
        room -= len(part.tokens)
        whole.MergeFrom(pb.AttachResponse.FromString(part.SerializeToString()))
    return True


@pytest.mark.parametrize("request_", [GENERATE, CONVERSATION], ids=["generate", "chat"])
async def test_calls_that_break_give_the_whole_answer_together(request_) -> None:
    draws = random.Random(SEED)
    async with gateway_with(Machine()) as client:
        uncut, plain = pb.AttachResponse(), pb.AttachResponse()
        await take(begin_call(client, request_), uncut, ALL)
        without = type(request_).FromString(request_.SerializeToString())
        without.resumable = False
        await take(begin_call(client, without), plain, ALL)
        num_calls = 0
        for _ in range(4):
            whole = pb.AttachResponse()
            is_all = await take(begin_call(client, request_), whole, draws.randint(0, 3))
            while not is_all:
                num_calls += 1
                asked = pb.AttachRequest(request_id="r", num_tokens=len(whole.tokens))
                is_all = await take(stub_of(client).Attach(asked), whole, draws.randint(1, 3))
            assert whole == uncut == plain
        await client.wait_idle()

    assert num_calls > 8
    assert len(uncut.prompt.token_ids) > 0
    assert len(uncut.tokens) == NUM_TOKENS


async def test_a_stream_goes_on_over_grpc_whose_executor_dies_while_nobody_reads() -> None:
    first, second = Machine(0), Machine(1)
    async with gateway_with(first, second) as client:
        uncut, whole = pb.AttachResponse(), pb.AttachResponse()
        await take(begin_call(client, GENERATE), uncut, ALL)
        for machine in (first, second):
            machine.goes_on.clear()
            machine.submits.clear()
        await take(begin_call(client, GENERATE), whole, 2)
        await left(client, "r")
        await until(lambda: client.num_generated() == [NUM_TOKENS // 2])
        dying, living = (first, second) if first.submits else (second, first)
        await dying.kill()
        await until(lambda: bool(living.resumed))
        living.goes_on.set()
        asked = pb.AttachRequest(request_id="r", num_tokens=len(whole.tokens))
        await take(stub_of(client).Attach(asked), whole, ALL)

    assert whole.finish.moves == 1
    whole.finish.moves = 0
    assert whole == uncut


async def test_a_stream_of_http_can_be_taken_up_over_grpc_by_its_newest_reader() -> None:
    executor = FakeExecutor()
    executor.script.midway.clear()
    async with gateway_with(executor) as client:
        await begun_and_left(client, "r", num_events=1)
        first, second = pb.AttachResponse(), pb.AttachResponse()
        call = stub_of(client).Attach(pb.AttachRequest(request_id="r"))
        going_on = asyncio.create_task(take(call, first, ALL))
        await until(lambda: bool(first.tokens))
        beside = stub_of(client).Attach(pb.AttachRequest(request_id="r"))
        instead = asyncio.create_task(take(beside, second, ALL))
        with pytest.raises(grpc.aio.AioRpcError) as superseded:
            await going_on
        executor.script.midway.set()
        await instead

    assert superseded.value.code() is grpc.StatusCode.ABORTED
    assert "".join(token.text for token in second.tokens) == "Hello, world"
    assert second.finish.reason == gen.FINISH_REASON_STOP


async def test_a_cancelled_stream_is_told_so_over_grpc() -> None:
    executor = FakeExecutor()
    executor.script.midway.clear()
    async with gateway_with(executor) as client:
        await begun_and_left(client, "r")
        await stub_of(client).Cancel(pb.CancelRequest(request_id="r"))
        whole = pb.AttachResponse()
        await take(stub_of(client).Attach(pb.AttachRequest(request_id="r")), whole, ALL)

    assert whole.finish.reason == gen.FINISH_REASON_CANCELLED


@pytest.mark.parametrize(
    ("asked", "code", "why"),
    [
        ({"request_id": ""}, grpc.StatusCode.INVALID_ARGUMENT, "request_id is required"),
        ({"request_id": "other"}, grpc.StatusCode.NOT_FOUND, "no resumable stream"),
        ({"request_id": "two"}, grpc.StatusCode.NOT_FOUND, "several answers"),
        ({"request_id": "r", "num_tokens": -1}, grpc.StatusCode.INVALID_ARGUMENT, "num_tokens: "),
        ({"request_id": "r", "num_tokens": 4}, grpc.StatusCode.INVALID_ARGUMENT, "num_tokens: "),
    ],
)
async def test_what_cannot_be_attached_to_is_said(asked, code, why) -> None:
    async with gateway_with(FakeExecutor()) as client:
        await Reading(client, "r").begin(CHAT, stream_body(evenflow=RESUMABLE), ALL)
        await Reading(client, "two").begin(CHAT, stream_body(evenflow=RESUMABLE, n=2), ALL)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await take(stub_of(client).Attach(pb.AttachRequest(**asked)), pb.AttachResponse(), ALL)

    assert refused.value.code() is code
    assert why in str(refused.value.details())
