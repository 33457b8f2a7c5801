"""What clients ask to be kept of a request's KV, in each API's words, and what they are told."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from tests.fake_executor import MODEL, NUM_PROMPT_TOKENS, Script
from tests.gateways import chat_body, gateway_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HOUR, MINUTES = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"}
SPANS = [
    gen.RetainedSpan(end=4, retention_s=3_600.0),
    gen.RetainedSpan(end=9, retention_s=300.0),
]
KEPT = gen.Retained(status=gen.RETENTION_STATUS_CLIPPED, spans=SPANS)
NOT_KEPT = gen.Retained(
    status=gen.RETENTION_STATUS_REJECTED, reason=gen.REJECTED_RETENTION_NO_HOST_CACHE
)
USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
KEYS = """
[[keys]]
name = "alice"
key = "sk-alice-0123456789"

[[keys]]
name = "bob"
key = "sk-bob-0123456789"
"""


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def message_body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 5, "messages": [USER], **more}


def marks(executor) -> list[tuple[float, int]]:
    return [(m.retention_s, m.num_messages) for m in executor.submits[-1].retention.marks]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        ({"evenflow": {"retention_s": 60}}, 60.0),
        ({"prompt_cache_retention": "in_memory"}, 300.0),
        ({"prompt_cache_retention": "24h"}, 86_400.0),
        ({"prompt_cache_retention": "in_memory", "evenflow": {"retention_s": 600}}, 600.0),
    ],
)
async def test_all_of_a_request_is_kept_as_long_as_asked_for(
    client, executor, path, asked, seconds
) -> None:
    prompt = {
        CHAT: {"messages": [USER]},
        COMPLETIONS: {"prompt": "Hi"},
        RESPONSES: {"input": "Hi"},
        MESSAGES: {"messages": [USER], "max_tokens": 5},
    }[path]

    response = await client.http.post(path, json={"model": MODEL, **prompt, **asked})

    assert response.status_code == 200, response.text
    assert marks(executor) == [(seconds, 0)]
    assert "x-evenflow-ignored" not in response.headers


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # The last turn's mark is about all, and outlasts none before it.
        (message_body(messages=[{"role": "user", "content": [text("Hi", cache_control=MINUTES)]}]),
         [(300.0, 0)]),
        (message_body(system=[text("Be brief.", cache_control=HOUR)],
                      messages=[{"role": "user", "content": [text("Hi", cache_control=MINUTES)]}]),
         [(3_600.0, 1), (300.0, 0)]),
        (message_body(system=[text("Be brief.", cache_control=MINUTES)],
                      messages=[{"role": "user", "content": [text("Hi", cache_control=HOUR)]}]),
         [(3_600.0, 0)]),
        # The template's turns: system, user, assistant, result of a call.
        (message_body(
            system="Be brief.",
            messages=[
                USER,
                {"role": "assistant", "content": [
                    {"type": "tool_use", "id": "c", "name": "f", "input": {},
                     "cache_control": MINUTES}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": "Sunny."},
                    text("Well?")]},
            ]),
         [(300.0, 3)]),
        (message_body(
            messages=[
                USER, ASSISTANT,
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c",
                     "content": [text("Sunny.", cache_control=HOUR)]}]},
            ]),
         [(3_600.0, 0)]),
        # A tool's is the system prompt's, or else the first turn's.
        (message_body(
            tools=[{"name": "f", "input_schema": {}, "cache_control": HOUR}],
            messages=[USER, ASSISTANT, USER]),
         [(3_600.0, 1)]),
        (message_body(cache_control=HOUR), [(3_600.0, 0)]),
    ],
)  # fmt: skip
async def test_anthropics_marks_are_of_the_turns_that_they_end(
    client, executor, body, expected
) -> None:
    response = await client.http.post(MESSAGES, json=body)

    assert response.status_code == 200, response.text
    assert marks(executor) == expected


async def test_of_several_answers_the_worst_is_told(client, executor) -> None:
    spans = [gen.RetainedSpan(end=9, retention_s=600.0)], [gen.RetainedSpan(end=4, retention_s=600)]
    accepted, deferred = gen.RETENTION_STATUS_ACCEPTED, gen.RETENTION_STATUS_DEFERRED
    told = [
        gen.Retained(status=accepted, spans=spans[0]),
        gen.Retained(status=deferred, spans=spans[0]),
        gen.Retained(status=deferred, spans=spans[1]),
    ]
    executor.script_for = lambda _: Script(retained=told[(len(executor.submits) - 1) % len(told)])

    response = await client.http.post(CHAT, json=chat_body(n=3, evenflow={"retention_s": 600}))

    entry = response.json()["evenflow"]["retention"]
    assert (entry["status"], entry["tokens"]) == ("deferred", 4)
    header = response.headers["x-evenflow-retention"]
    assert header == "status=deferred, tokens=4, retention_s=600.0"


async def test_without_a_hint_nothing_is_asked_for(client, executor) -> None:
    await client.http.post(CHAT, json=chat_body())
    assert not executor.submits[-1].HasField("retention")
    body = chat_body(session_id="s", prompt_cache_key="k", evenflow={"retention_s": 0})

    response = await client.http.post(CHAT, json=body)

    # The session's name is for what is kept while a tool runs.
    assert executor.submits[-1].retention == gen.RetentionHint(session_id="s")
    assert "retention" not in response.json().get("evenflow", {})
    assert "x-evenflow-retention" not in response.headers


@pytest.mark.parametrize(
    ("named", "headers", "session"),
    [
        ({"session_id": "a", "prompt_cache_key": "c"}, {"x-session-id": "b"}, "a"),
        ({"prompt_cache_key": "c"}, {"x-session-id": "b"}, "b"),
        ({"prompt_cache_key": "c"}, {}, "c"),
        ({}, {}, ""),
    ],
)
async def test_a_session_has_the_name_that_is_nearest(
    client, executor, named, headers, session
) -> None:
    body = chat_body(**named, evenflow={"retention_s": 60})

    await client.http.post(CHAT, json=body, headers=headers)

    assert executor.submits[-1].retention.session_id == session


@pytest.mark.parametrize(
    ("path", "body", "headers", "field"),
    [
        (CHAT, {"evenflow": {"retention_s": -1}}, {}, "evenflow.retention_s"),
        (CHAT, {"evenflow": {"retention_s": 86_401}}, {}, "evenflow.retention_s"),
        (CHAT, {"prompt_cache_retention": "1w"}, {}, "prompt_cache_retention"),
        (CHAT, {"session_id": "s" * 257}, {}, "session_id"),
        (CHAT, {}, {"x-session-id": "s" * 257}, "x-session-id"),
        (MESSAGES, {"cache_control": {"type": "ephemeral", "ttl": "1d"}}, {}, "cache_control.ttl"),
        (
            MESSAGES,
            {"system": [text("Hi", cache_control={"type": "forever"})]},
            {},
            "system[0].cache_control.type",
        ),
    ],
)
async def test_what_no_api_has_is_refused_by_name(client, path, body, headers, field) -> None:
    asked = (chat_body() if path == CHAT else message_body()) | body

    response = await client.http.post(path, json=asked, headers=headers)

    assert response.status_code == 400
    assert field in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("retained", "entry", "header"),
    [
        (
            KEPT,
            {"status": "clipped", "reason": None, "tokens": 9, "retention_s": 300.0},
            "status=clipped, tokens=9, retention_s=300.0",
        ),
        (
            NOT_KEPT,
            {"status": "rejected", "reason": "no_host_cache", "tokens": 0, "retention_s": 0.0},
            "status=rejected, reason=no_host_cache, tokens=0, retention_s=0.0",
        ),
    ],
)
async def test_an_answer_says_what_came_of_the_hint(
    client, executor, retained, entry, header
) -> None:
    executor.script = Script(retained=retained)
    body = chat_body(evenflow={"retention_s": 600})

    whole = await client.http.post(CHAT, json=body)
    streamed = await client.http.post(CHAT, json=body | {"stream": True})

    assert whole.json()["evenflow"]["retention"] == entry
    assert whole.headers["x-evenflow-retention"] == header
    *_, last, _ = (line for line in streamed.text.split("\n") if line)
    assert json.loads(last.removeprefix("data: "))["evenflow"]["retention"] == entry
    other = await client.http.post(RESPONSES, json={"model": MODEL, "input": "Hi", "evenflow": {}})
    assert other.json()["evenflow"]["retention"] == entry


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("num_cached", "minutes", "hour"),
    [(0, NUM_PROMPT_TOKENS - 4, 4), (2, NUM_PROMPT_TOKENS - 4, 2), (5, NUM_PROMPT_TOKENS - 5, 0)],
)
async def test_anthropics_usage_counts_what_is_kept_and_was_not_cached(
    client, executor, stream, num_cached, minutes, hour
) -> None:
    executor.script = Script(retained=KEPT, num_cached_tokens=num_cached)

    response = await client.http.post(MESSAGES, json=message_body(stream=stream))

    if stream:
        (data,) = (line for line in response.text.split("\n") if '"message_delta"' in line[:40])
        usage = json.loads(data.removeprefix("data: "))["usage"]
    else:
        usage = response.json()["usage"]
    assert usage["cache_creation"] == {
        "ephemeral_5m_input_tokens": minutes,
        "ephemeral_1h_input_tokens": hour,
    }
    assert usage["cache_creation_input_tokens"] == minutes + hour
    assert usage["cache_read_input_tokens"] == num_cached
    assert usage["input_tokens"] == NUM_PROMPT_TOKENS - num_cached - minutes - hour


async def test_without_a_hint_the_executor_knows_whose_tool_calls_they_are(
    executor, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    async with gateway_for(executor, api_keys_file=file) as client:
        await client.wait_ready()
        headers = {"authorization": "Bearer sk-alice-0123456789"}
        response = await client.http.post(CHAT, json=chat_body(evenflow={}), headers=headers)

    assert executor.submits[-1].retention == gen.RetentionHint(account="alice")
    assert "retention" not in response.json().get("evenflow", {})


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("caches", [True, False])
async def test_a_next_prefix_is_asked_for_and_told_by_name_where_it_has_no_effect(
    executor, caches, path
) -> None:
    executor.caches_prefixes = caches
    body = {
        CHAT: {"messages": [USER]},
        RESPONSES: {"input": "Hi"},
        MESSAGES: {"messages": [USER], "max_tokens": 5},
    }[path] | {"model": MODEL, "evenflow": {"next_prefix": True}}
    async with gateway_for(executor) as client:
        await client.wait_ready()
        response = await client.http.post(path, json=body)
        strict = body | {"evenflow": {"next_prefix": True, "strict": True}}
        refused = await client.http.post(path, json=strict)

    assert executor.submits[0].retention == gen.RetentionHint(next_prefix=True)
    ignored = response.headers.get("x-evenflow-ignored", "")
    assert ignored == ("" if caches else "evenflow.next_prefix")
    assert refused.status_code == (200 if caches else 400)
    assert caches or "evenflow.next_prefix" in refused.text


async def test_sessions_are_released_by_the_key_that_keeps_them(executor, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    alice, bob = ({"authorization": f"Bearer sk-{name}-0123456789"} for name in ("alice", "bob"))
    async with gateway_for(executor, api_keys_file=file) as client:
        await client.wait_ready()
        body = chat_body(session_id="s", evenflow={"retention_s": 60})
        await client.http.post(CHAT, json=body, headers=alice)
        assert executor.submits[-1].retention.account == "alice"
        executor.sessions["alice", "s/1"] = 96

        refused = await client.http.delete("/v1/evenflow/sessions/s/1", headers=bob)
        assert refused.status_code == 404
        assert "s/1" in refused.json()["error"]["message"]
        released = await client.http.delete("/v1/evenflow/sessions/s/1", headers=alice)
        assert released.json() == {"id": "s/1", "released_tokens": 96}
        gone = await client.http.delete("/v1/evenflow/sessions/s/1", headers=alice)
        assert gone.status_code == 404


async def test_grpc_has_the_same(client, executor) -> None:
    executor.script = Script(retained=KEPT)
    executor.sessions["", "s"] = 32
    stub: pb_grpc.GatewayServiceAsyncStub = pb_grpc.GatewayServiceStub(client.channel)
    mark = gen.RetentionMark(retention_s=60.0, num_messages=1)
    hint = gen.RetentionHint(session_id="s", marks=[mark], account="another's")
    asked = pb.GenerateRequest(model=MODEL, text="Hi", retention=hint)
    bare = pb.GenerateRequest(model=MODEL, text="Hi")

    *_, last = [part async for part in stub.Generate(asked)]

    assert last.finish.retained == KEPT
    assert executor.submits[-1].retention == gen.RetentionHint(session_id="s", marks=[mark])
    released = await stub.ReleaseSession(pb.ReleaseSessionRequest(session_id="s"))
    assert released.num_tokens == 32
    for session_id, code in (("s", "NOT_FOUND"), ("", "INVALID_ARGUMENT")):
        with pytest.raises(aio.AioRpcError) as refused:
            await stub.ReleaseSession(pb.ReleaseSessionRequest(session_id=session_id))
        assert refused.value.code() is grpc.StatusCode[code]
    asked.retention.session_id = ""
    for name, metadata in (("of-metadata", (("x-session-id", "of-metadata"),)), ("", ())):
        [part async for part in stub.Generate(asked, metadata=metadata)]
        assert executor.submits[-1].retention == gen.RetentionHint(session_id=name, marks=[mark])
        [part async for part in stub.Generate(bare, metadata=metadata)]
        assert executor.submits[-1].retention.session_id == name
    with pytest.raises(aio.AioRpcError, match="x-session-id") as refused:
        [part async for part in stub.Generate(bare, metadata=(("x-session-id", "s" * 257),))]
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    asked.retention.marks[0].retention_s = -1
    with pytest.raises(aio.AioRpcError, match=r"retention\.marks\.retention_s"):
        [part async for part in stub.Generate(asked)]
