"""The stream between gateway and executor: breaks, recovery, lost and repeated messages."""

import asyncio
import json
import math
from collections.abc import AsyncIterator

import grpc
import pytest

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2 as pb_gateway
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_gateway_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from services.gateway.executors.link import DROPPED_LOADS
from services.gateway.executors.routing import expected_wait_s
from services.gateway.settings import MAX_EDGE_MESSAGE_BYTES
from services.kit.transport import PLAIN
from services.reporting.load import ExecutorLoad
from tests.fake_executor import MODEL, NUM_PROMPT_TOKENS, FakeExecutor, Script, Session
from tests.gateways import Client, chat_body, gateway_for, gateway_with, started, stream_body, until

STOPPED = pb.Ending(finish_reason=gen.FINISH_REASON_STOP)


def start_stream(client: Client, request_id: str, **parameters: object) -> asyncio.Task:
    return asyncio.create_task(
        client.http.post(
            "/v1/chat/completions",
            json=stream_body(**parameters),
            headers={"x-request-id": request_id},
        )
    )


def text_and_error(body: str) -> tuple[str, dict[str, object] | None]:
    """Return an event stream's text and its error, which only the last event may be."""
    events = [event.removeprefix("data: ") for event in body.strip().split("\n\n")]
    decoded = [json.loads(event) for event in events if event != "[DONE]"]
    error = decoded.pop()["error"] if "error" in decoded[-1] else None
    assert (events[-1] == "[DONE]") == (error is None)
    text = "".join(
        choice["delta"].get("content", "") for event in decoded for choice in event["choices"]
    )
    return text, error


async def test_a_dying_executor_ends_each_stream_with_one_error(client, executor) -> None:
    executor.script.ending.clear()
    paced = {"evenflow": {"slo_tbt_ms": 3_600_000}}
    streams = [start_stream(client, f"r{k}", **(paced if k % 2 else {})) for k in range(10)]
    await until(lambda: client.num_generated() == [3] * 10)

    await executor.kill()
    answers = await asyncio.gather(*streams)
    refused = await client.http.post("/v1/chat/completions", json=chat_body())
    ready = await client.http.get("/ready")

    for answer in answers:
        text, error = text_and_error(answer.text)
        assert text == "Hello, world"  # also what was held back
        assert error["code"] == "executor_lost"
    assert (refused.status_code, ready.status_code) == (503, 503)


async def test_where_nothing_moves_a_dying_executor_fails_whole_answers_with_503(executor) -> None:
    executor.script.ending.clear()
    async with gateway_for(executor, failover_timeout_s=0.0) as client:
        await client.wait_ready()
        answer = asyncio.create_task(client.http.post("/v1/chat/completions", json=chat_body()))
        await executor.until(lambda: len(executor.delivered) == 1)

        await executor.kill()

        assert (await answer).status_code == 503


async def test_service_returns_with_the_executor_and_what_it_serves_then(client, executor) -> None:
    await until(lambda: bool(executor.gateway_ids))
    await executor.kill()
    await until(lambda: not client.gateway.dispatcher.is_ready)
    executor.model = "another-model"

    await executor.start()
    await client.wait_ready()
    answer = await client.http.post("/v1/chat/completions", json=chat_body(model="another-model"))

    assert answer.status_code == 200
    assert executor.gateway_ids == ["gateway-under-test"] * 2


async def test_a_gateway_that_starts_first_finds_its_executor_later() -> None:
    executor = FakeExecutor()
    async with gateway_for(executor) as client:
        before = await client.http.post("/v1/chat/completions", json=chat_body())
        await executor.start()
        await client.wait_ready()
        after = await client.http.post("/v1/chat/completions", json=chat_body())
    await executor.kill()

    assert (before.status_code, after.status_code) == (503, 200)


async def manual_session(client: Client, executor: FakeExecutor) -> tuple[asyncio.Task, Session]:
    """Start request "r" and return the session on which the test plays its tokens."""
    executor.script = Script(texts=())
    executor.script.ending.clear()
    stream = start_stream(client, "r")
    await executor.until(lambda: len(executor.submits) == 1)
    assert executor.session is not None
    return stream, executor.session


async def test_repeated_tokens_are_dropped(client, executor) -> None:
    stream, session = await manual_session(client, executor)

    session.send_tokens("r", 0, ["a", "b"])
    session.send_tokens("r", 1, ["b", "c"])
    session.send_tokens("r", 0, ["a"])
    session.send_tokens("r", 3, ["d"])
    session.end("r", 4, STOPPED)

    assert text_and_error((await stream).text) == ("abcd", None)


async def test_a_missing_token_fails_its_request_alone(client, executor) -> None:
    stream, session = await manual_session(client, executor)
    other = start_stream(client, "other")
    await executor.until(lambda: len(executor.submits) == 2)

    session.send_tokens("r", 0, ["a"])
    session.send_tokens("r", 2, ["c"])
    await executor.until(lambda: executor.aborted == ["r"])
    session.send_tokens("other", 0, ["ok"])
    session.end("other", 1, STOPPED)

    text, error = text_and_error((await stream).text)
    assert (text, error["code"]) == ("a", "executor_lost")
    assert text_and_error((await other).text) == ("ok", None)


async def test_a_missing_frame_fails_all_and_the_link_is_made_anew(client, executor) -> None:
    stream, session = await manual_session(client, executor)
    session.send_tokens("r", 0, ["a"])

    session.send(sequence=99)

    text, error = text_and_error((await stream).text)
    assert (text, error["code"]) == ("a", "executor_lost")
    executor.script = Script()
    await client.wait_ready()
    answer = await client.http.post("/v1/chat/completions", json=chat_body())
    assert answer.status_code == 200
    assert len(executor.gateway_ids) == 2


@pytest.mark.parametrize("code", ["OK", "CANCELLED", "UNAVAILABLE", "INVALID_ARGUMENT", "UNKNOWN"])
async def test_however_the_stream_ends_it_is_made_anew(client, executor, code) -> None:
    stream, session = await manual_session(client, executor)
    executor.script = Script()

    session.close(grpc.StatusCode[code])

    assert text_and_error((await stream).text) == ("Hello, world", None)
    assert executor.epochs[0] < executor.epochs[1]


async def test_a_repeated_frame_is_ignored(client, executor) -> None:
    stream, session = await manual_session(client, executor)
    session.send_tokens("r", 0, ["a"])
    session.send(sequence=0)
    session.end("r", 1, STOPPED)

    assert text_and_error((await stream).text) == ("a", None)


async def test_merged_frames_lose_nothing(client, executor) -> None:
    stream, session = await manual_session(client, executor)
    tokens = [pb.Token(id=k, text=str(k)) for k in range(200)]
    output = pb.RequestOutput(request_id="r", tokens=tokens, ending=STOPPED)

    session.send(outputs=[output])

    assert text_and_error((await stream).text) == ("".join(map(str, range(200))), None)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[FakeExecutor, FakeExecutor, Client]]:
    """Two executors of one model behind one gateway."""
    executors = [FakeExecutor(executor_id=f"executor-{k}") for k in range(2)]
    for executor in executors:
        await executor.start()
    async with gateway_for(*executors) as client:
        await until(lambda: all(executor.session for executor in executors))
        await client.wait_ready()
        yield executors[0], executors[1], client
    for executor in executors:
        await executor.kill()


def tell(executor: FakeExecutor, load: pb.Load) -> None:
    assert executor.session is not None
    executor.session.send(load=load)


def loads_of(client: Client) -> list[ExecutorLoad | None]:
    return [one.load for one in client.gateway.dispatcher.placing._candidates()]


async def test_requests_spread_over_executors_by_load(pair) -> None:
    first, second, client = pair
    for executor in (first, second):
        executor.script.ending.clear()

    streams = [start_stream(client, f"r{k}") for k in range(6)]
    await until(lambda: len(first.submits) + len(second.submits) == 6)
    counts = [len(first.submits), len(second.submits)]
    for executor in (first, second):
        executor.script.ending.set()
    await asyncio.gather(*streams)

    assert counts == [3, 3]


async def test_idle_executors_are_asked_by_turns(pair) -> None:
    first, second, client = pair
    for _ in range(4):
        await client.http.post("/v1/chat/completions", json=chat_body())

    assert [len(first.submits), len(second.submits)] == [2, 2]


async def test_requests_go_where_the_wait_is_shortest_by_what_executors_say(pair) -> None:
    first, second, client = pair
    tell(first, pb.Load(num_newcomer_tokens=500, prefill_tps=100))
    tell(second, pb.Load(num_newcomer_tokens=500, prefill_tps=400))
    await until(lambda: None not in loads_of(client))
    for _ in range(4):
        await client.http.post("/v1/chat/completions", json=chat_body())

    assert [len(first.submits), len(second.submits)] == [0, 4]


async def test_what_an_executor_says_with_its_model_counts_before_its_first_frame() -> None:
    executors = [FakeExecutor(executor_id=f"e{k}") for k in range(2)]
    executors[0].load = pb.Load(num_newcomer_tokens=500, prefill_tps=100)
    executors[1].load = pb.Load(num_newcomer_tokens=500, prefill_tps=400)
    async with gateway_with(*executors) as client:
        for _ in range(4):
            await client.http.post("/v1/chat/completions", json=chat_body())

    assert [len(one.submits) for one in executors] == [0, 4]


@pytest.mark.logs("executor_load_dropped")
@pytest.mark.parametrize(
    "impossible",
    [
        pytest.param(pb.Load(num_newcomers=-1), id="negative"),
        pytest.param(pb.Load(prefill_tps=math.nan), id="not-a-number"),
        pytest.param(pb.Load(kv_unavailable_frac=1.01), id="a-share-above-1"),
    ],
)
async def test_own_requests_stand_in_for_a_load_that_cannot_be(pair, impossible) -> None:
    first, second, client = pair
    dropped = DROPPED_LOADS._value.get()
    tell(first, pb.Load(num_newcomer_tokens=10**6, prefill_tps=1))
    await until(lambda: any(loads_of(client)))
    tell(first, impossible)
    await until(lambda: not any(loads_of(client)))
    for _ in range(4):
        await client.http.post("/v1/chat/completions", json=chat_body())

    assert DROPPED_LOADS._value.get() == dropped + 1
    assert [len(first.submits), len(second.submits)] == [2, 2]


async def test_own_requests_count_until_a_report_has_them(pair) -> None:
    first, second, client = pair
    candidate = client.gateway.dispatcher.placing._candidates
    first.script.generating.clear()
    tell(first, pb.Load(prefill_tps=100))
    tell(second, pb.Load(prefill_tps=1, num_newcomer_tokens=10**6))
    await until(lambda: None not in loads_of(client))
    stream = start_stream(client, "r")
    await until(lambda: any(live.home for live in client.gateway.dispatcher._live.values()))
    unreported = [one.num_unreported_tokens for one in candidate()]
    tell(first, pb.Load(prefill_tps=100, num_newcomers=1, num_newcomer_tokens=NUM_PROMPT_TOKENS))
    await until(lambda: expected_wait_s(candidate()[0]) == NUM_PROMPT_TOKENS / 100)
    first.script.generating.set()
    await stream

    assert unreported == [2, 0]  # "Say hello.", as gateways estimate it


async def test_the_turns_of_a_conversation_go_to_one_executor_that_caches_prefixes() -> None:
    executors = [FakeExecutor(executor_id=f"executor-{k}", caches_prefixes=True) for k in range(2)]
    for executor in executors:
        await executor.start()
    async with gateway_for(*executors) as client:
        await until(lambda: all(executor.session for executor in executors))
        await client.wait_ready()
        for num_turns in (1, 2, 3):
            for name in "abcde":
                turns = [{"role": "user", "content": f"{name}{k}"} for k in range(num_turns)]
                await client.http.post("/v1/chat/completions", json=chat_body(messages=turns))
    for executor in executors:
        await executor.kill()

    first, second = (
        [submit.chat.messages[0].content for submit in executor.submits] for executor in executors
    )
    assert not set(first) & set(second)
    assert sorted(first + second) == sorted(["a0", "b0", "c0", "d0", "e0"] * 3)


@pytest.mark.parametrize("edge", ["http", "metadata", "message"])
async def test_a_session_has_a_home_whatever_its_requests_begin_with(edge: str) -> None:
    async def ask(client: Client, text: str, session: str) -> None:
        if edge == "http":
            body = chat_body(messages=[{"role": "user", "content": text}])
            headers = {"x-session-id": session}
            await client.http.post("/v1/chat/completions", json=body, headers=headers)
            return
        turns = [gen.ChatMessage(role="user", content=text)]
        asked = pb_gateway.ChatRequest(model=MODEL, messages=turns)
        if edge == "message":
            asked.retention.session_id = session
        metadata = (("x-session-id", session),) if edge == "metadata" else ()
        stub = pb_gateway_grpc.GatewayServiceStub(client.channel)
        assert [part async for part in stub.Chat(asked, metadata=metadata)][-1].HasField("finish")

    executors = [FakeExecutor(executor_id=f"executor-{k}", caches_prefixes=True) for k in range(2)]
    async with started(*executors), gateway_for(*executors) as client:
        await until(lambda: all(executor.session for executor in executors))
        await client.wait_ready()
        for text in "abc":
            for session in ("s1", "s2", "s3", "s4"):
                await ask(client, f"{text} {session}", session)
    asked = [[one.holder.session_id for one in executor.submits] for executor in executors]

    assert not set(asked[0]) & set(asked[1])
    assert sorted(asked[0] + asked[1]) == ["s1"] * 3 + ["s2"] * 3 + ["s3"] * 3 + ["s4"] * 3


async def test_a_silent_executor_passes_the_request_to_the_next() -> None:
    executors = [FakeExecutor(executor_id=f"executor-{k}") for k in range(2)]
    executors[0].script.accepting.clear()
    for executor in executors:
        await executor.start()
    async with gateway_for(*executors, submit_timeout_s=1.0) as client:
        await until(lambda: all(executor.session for executor in executors))
        await client.wait_ready()
        answer = await client.http.post("/v1/chat/completions", json=chat_body())
        await executors[0].until(lambda: len(executors[0].aborted) == 1)
    for executor in executors:
        await executor.kill()

    assert answer.status_code == 200


TOO_LONG = pb.Rejected(code=pb.REJECT_CODE_CONTEXT_LENGTH, field="prompt", message="too long")


@pytest.mark.parametrize(
    ("max_tokens", "rejected_by", "status", "num_submits"),
    [
        pytest.param(500, (), 200, [0, 1], id="known-at-the-gateway"),
        pytest.param(None, (0,), 200, [1, 1], id="counted-by-the-executor"),
        pytest.param(None, (0, 1), 400, [1, 1], id="too-long-for-all"),
        pytest.param(9_001, (), 200, [0, 1], id="cut-by-the-longest"),
    ],
)
async def test_what_is_too_long_for_one_executor_goes_to_a_longer_one(
    max_tokens, rejected_by, status, num_submits
) -> None:
    executors = [
        FakeExecutor(executor_id=f"executor-{k}", max_model_len=length)
        for k, length in enumerate((100, 9_000))
    ]
    for executor in executors:
        await executor.start()
    for k in rejected_by:
        executors[k].script = Script(reject=TOO_LONG)
    async with gateway_for(*executors) as client:
        await until(lambda: all(executor.session for executor in executors))
        await client.wait_ready()
        body = chat_body(max_tokens=max_tokens)
        answer = await client.http.post("/v1/chat/completions", json=body)
    for executor in executors:
        await executor.kill()

    assert answer.status_code == status
    assert [len(executor.submits) for executor in executors] == num_submits


@pytest.mark.logs("request_rerouted")
async def test_an_unavailable_executor_passes_the_request_to_the_next(pair) -> None:
    first, second, client = pair
    first.script = Script(
        reject=pb.Rejected(code=pb.REJECT_CODE_UNAVAILABLE, message="shutting down")
    )

    answer = await client.http.post("/v1/chat/completions", json=chat_body())

    assert answer.status_code == 200
    # The tracker keeps the newest routing only: the second is told that it is one.
    assert 0 < first.submits[0].generation < second.submits[0].generation


async def test_a_form_that_one_executor_is_too_busy_to_compile_goes_to_no_other(pair) -> None:
    first, second, client = pair
    busy = pb.Rejected(code=pb.REJECT_CODE_BUSY, message="too many forms wait")
    first.script = second.script = Script(reject=busy)
    stub = pb_gateway_grpc.GatewayServiceStub(client.channel)

    answer = await client.http.post("/v1/chat/completions", json=chat_body())
    assert (len(first.submits), len(second.submits)) == (1, 0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Generate(pb_gateway.GenerateRequest(model=MODEL, text="Hi")):
            pass

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    error = answer.json()["error"]
    assert (error["message"], error["code"]) == ("too many forms wait", "forms_busy")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(first.submits) + len(second.submits) == 2


@pytest.mark.logs("request_moved")
async def test_an_executor_that_dies_before_accepting_passes_the_request_to_the_next(pair) -> None:
    first, second, client = pair
    first.script.accepting.clear()
    stream = start_stream(client, "r")
    await first.until(lambda: len(first.submits) == 1)

    await first.kill()

    assert text_and_error((await stream).text) == ("Hello, world", None)
    assert len(second.submits) == 1


async def test_a_request_that_two_executors_died_over_goes_to_no_third() -> None:
    executors = [FakeExecutor(executor_id=f"executor-{k}") for k in range(3)]
    for executor in executors:
        executor.script.accepting.clear()
        await executor.start()
    async with gateway_for(*executors) as client:
        await until(lambda: all(executor.session for executor in executors))
        stream = start_stream(client, "r")
        alive = list(executors)
        for _ in range(2):
            await until(lambda: any(executor.submits for executor in alive))
            asked = next(executor for executor in alive if executor.submits)
            alive.remove(asked)
            await asked.kill()

        answer = await stream

    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "generation_failed"
    assert alive[0].submits == []
    await alive[0].kill()


@pytest.mark.parametrize(
    ("num_bytes", "code"),
    [
        pytest.param(PLAIN.max_message_bytes, "RESOURCE_EXHAUSTED", id="above-the-edge-s-limit"),
        # What the gateway adds makes it too large for the way to the executor.
        pytest.param(MAX_EDGE_MESSAGE_BYTES, "INVALID_ARGUMENT", id="as-large-as-the-edge-takes"),
    ],
)
async def test_a_message_too_large_ends_its_own_call_and_nothing_else(
    client, executor, num_bytes, code
) -> None:
    executor.script.midway.clear()
    other = start_stream(client, "other")
    await until(lambda: client.num_generated() == [1])
    message = pb_gateway.GenerateRequest(model=MODEL, text="x" * (num_bytes - 64))
    message.text += "x" * (num_bytes - message.ByteSize())

    options = [("grpc.max_send_message_length", -1)]
    address = f"127.0.0.1:{client.gateway.grpc_port}"
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pb_gateway_grpc.GatewayServiceStub(channel).Generate(message).read()
    executor.script.midway.set()

    assert message.ByteSize() == num_bytes
    assert refused.value.code().name == code
    (submit,) = executor.submits
    assert submit.request_id.startswith("other:")
    assert text_and_error((await other).text) == ("Hello, world", None)


async def test_the_death_of_one_executor_leaves_the_other_s_streams_alone(pair) -> None:
    first, second, client = pair
    for executor in (first, second):
        executor.script.ending.clear()
    lost = start_stream(client, "a")
    await first.until(lambda: len(first.delivered) == 1)
    kept = start_stream(client, "b")
    await second.until(lambda: len(second.delivered) == 1)

    await first.kill()
    _, error = text_and_error((await lost).text)
    second.script.ending.set()

    assert error["code"] == "executor_lost"
    assert text_and_error((await kept).text) == ("Hello, world", None)
