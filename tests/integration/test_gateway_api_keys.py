"""API keys: who may call, how much each may have, and what is never written down."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import anthropic
import grpc
import pytest
import redis
import structlog
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from evenflow.executor.v1 import executor_pb2 as pb_executor
from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from lab.stack.redis_server import RedisServer
from services.gateway.access.key_sources import REDIS_KEY
from tests.fake_executor import EVENT_TIMEOUT_S, MODEL, NUM_PROMPT_TOKENS, FakeExecutor
from tests.gateways import Client, chat_body, gateway_for, stream_body

ALICE, BOB, CAROL = "sk-alice-0123456789", "sk-bob-0123456789", "sk-carol-0123456789"
DAVE = "sk-dave-0123456789"  # comes later
KEYS = f"""
[[keys]]
name = "alice"
key = "{ALICE}"
max_live_requests = 1
may_state_fairness_ids = false

[[keys]]
name = "bob"
key = "{BOB}"
tokens_per_minute = {NUM_PROMPT_TOKENS + 3}  # of one answer of the fake executor

[[keys]]
name = "carol"
key = "{CAROL}"
"""
URL = "/v1/chat/completions"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def models_status(client: Client, key: str) -> int:
    return (await client.http.get("/v1/models", headers=bearer(key))).status_code


def counted(kind: str) -> float:
    """Return how many tokens CAROL has used so far, as the metrics say."""
    labels = {"api_key": "carol", "kind": kind}
    return REGISTRY.get_sample_value("evenflow_gateway_key_tokens_total", labels) or 0.0


FLOORS = {MODEL: {"min_slo_tbt_s": 0.5}}  # of clients: an operator may say otherwise


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    return file


@pytest.fixture
async def client(executor: FakeExecutor, tmp_path: Path) -> AsyncIterator[Client]:
    file = written(tmp_path, KEYS)
    async with gateway_for(executor, api_keys_file=file, api_keys_refresh_s=0.1) as client:
        await client.wait_ready()
        await eventually(lambda: models_status(client, CAROL), 200)  # the file was read
        yield client


@pytest.mark.parametrize(
    "headers",
    [{}, bearer("sk-nobody-0123456789"), {"authorization": ALICE}, {"authorization": "Bearer"}],
)
async def test_without_a_good_key_the_answer_is_401_and_nothing_is_submitted(
    client: Client, executor: FakeExecutor, headers: dict[str, str]
) -> None:
    answer = await client.http.post(URL, json=chat_body(), headers=headers)

    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert executor.submits == []


async def test_with_a_key_there_is_an_answer(client: Client) -> None:
    answer = await client.http.post(URL, json=chat_body(), headers=bearer(CAROL))

    assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_need_no_key(client: Client, path: str) -> None:
    assert (await client.http.get(path)).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/models", "/openapi.json", "/metrics", "/no-such-path", "/healthy"]
)
async def test_everything_else_needs_one(client: Client, path: str) -> None:
    assert (await client.http.get(path)).status_code == 401


async def test_a_key_may_have_so_many_requests_at_a_time(
    client: Client, executor: FakeExecutor
) -> None:
    executor.script.ending.clear()
    first = asyncio.create_task(
        client.http.post(URL, json=stream_body(), headers=bearer(ALICE) | {"x-request-id": "first"})
    )
    await executor.until(lambda: len(executor.submits) == 1)
    second = await client.http.post(URL, json=chat_body(), headers=bearer(ALICE))
    others = asyncio.create_task(client.http.post(URL, json=chat_body(), headers=bearer(CAROL)))
    await executor.until(lambda: len(executor.submits) == 2)
    executor.script.ending.set()

    assert (await first).status_code == 200
    assert (await others).status_code == 200
    assert second.status_code == 429
    assert second.headers["retry-after"] == "1"
    assert second.json()["error"]["code"] == "rate_limit_exceeded"
    assert (await client.http.post(URL, json=chat_body(), headers=bearer(ALICE))).status_code == 200


async def test_a_key_that_states_no_limit_gets_half_of_the_places(
    executor: FakeExecutor, tmp_path: Path
) -> None:
    executor.script.ending.clear()
    file = written(tmp_path, KEYS)
    async with gateway_for(executor, api_keys_file=file, max_live_requests=4) as client:
        await client.wait_ready()
        await eventually(lambda: models_status(client, CAROL), 200)
        live = [chat(client, CAROL, request_id=f"r{k}") for k in range(2)]
        await executor.until(lambda: len(executor.submits) == 2)
        third = await client.http.post(URL, json=chat_body(), headers=bearer(CAROL))
        other = asyncio.create_task(client.http.post(URL, json=chat_body(), headers=bearer(BOB)))
        await executor.until(lambda: len(executor.submits) == 3)
        executor.script.ending.set()

        assert (await other).status_code == 200
        for call in live:
            assert [answer async for answer in call]
    assert third.status_code == 429


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"evenflow": {"slo_tbt_ms": 19}}, "slo_tbt"),
        ({"evenflow": {"slo_tbt_ms": 20}}, None),
        ({"priority": -1}, "priority"),
        ({"evenflow": {"priority": -1}}, "evenflow.priority"),
        ({"priority": -1, "evenflow": {"priority": 1}}, None),
    ],
)
async def test_what_a_key_may_not_ask_for_is_refused(
    executor: FakeExecutor, tmp_path: Path, asked: dict[str, object], param: str | None
) -> None:
    file = written(tmp_path, KEYS)
    floors = {MODEL: {"min_slo_tbt_s": 0.02}}
    async with gateway_for(executor, api_keys_file=file, slo_floors=floors) as client:
        await client.wait_ready()
        await eventually(lambda: models_status(client, CAROL), 200)
        answer = await client.http.post(URL, json=chat_body(**asked), headers=bearer(CAROL))

    if param is None:
        assert answer.status_code == 200
        return
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("own", "rate_tps"), [("", 5.2), ("3", 3.0), ("0", 0.0)])
async def test_a_key_s_readers_read_as_its_entry_says_else_as_the_model_s(
    executor: FakeExecutor, tmp_path: Path, own: str, rate_tps: float
) -> None:
    entry = f'[[keys]]\nname = "alice"\nkey = "{ALICE}"\n'
    if own:
        entry += f"default_reading_rate_tps = {own}\n"
    file = written(tmp_path, entry)
    rates = {MODEL: 5.2}
    settings = {"api_keys_file": file, "default_reading_rate_tps": rates, "slo_floors": FLOORS}
    async with gateway_for(executor, **settings) as client:
        await client.wait_ready()
        await eventually(lambda: models_status(client, ALICE), 200)
        await client.http.post(URL, json=stream_body(), headers=bearer(ALICE))

    assert executor.submits[0].service_level.consumption_rate_tps == rate_tps


@pytest.mark.parametrize(("own", "status"), [({}, 400), ({"tuned": {}}, 200)])
async def test_a_model_s_floors_are_its_adapters_too_unless_they_have_their_own(
    own: dict[str, object], status: int
) -> None:
    executor = FakeExecutor(adapters=[pb_executor.Adapter(model="tuned")])
    await executor.start()
    floors = {MODEL: {"min_slo_tbt_s": 0.02}} | own
    async with gateway_for(executor, slo_floors=floors) as client:
        await client.wait_ready()
        body = chat_body(model="tuned", evenflow={"slo_tbt_ms": 19})
        answer = await client.http.post(URL, json=body)
    await executor.kill()

    assert answer.status_code == status


async def test_a_key_that_has_used_its_tokens_waits_for_the_next_minute(client: Client) -> None:
    first = await client.http.post(URL, json=chat_body(), headers=bearer(BOB))
    second = await client.http.post(URL, json=chat_body(), headers=bearer(BOB))

    assert (first.status_code, second.status_code) == (200, 429)
    assert 1 <= int(second.headers["retry-after"]) <= 60
    assert second.headers["x-ratelimit-limit-tokens"] == str(NUM_PROMPT_TOKENS + 3)
    assert second.headers["x-ratelimit-remaining-tokens"] == "0"


async def test_a_prompt_counts_although_its_reader_left_before_it_was_answered(
    client: Client, executor: FakeExecutor
) -> None:
    executor.script.accepting.clear()
    long = [{"role": "user", "content": "x" * 1_000}]
    asking = client.http.post(URL, json=chat_body(messages=long), headers=bearer(BOB))
    leaving = asyncio.create_task(asking)
    await executor.until(lambda: len(executor.submits) == 1)
    leaving.cancel()
    await executor.until(lambda: len(executor.aborted) == 1)
    await client.wait_idle()
    executor.script.accepting.set()

    refused = await client.http.post(URL, json=chat_body(), headers=bearer(BOB))

    assert refused.status_code == 429


async def test_what_no_executor_takes_counts_for_nothing(
    client: Client, executor: FakeExecutor
) -> None:
    executor.script.reject = pb_executor.Rejected(code=pb_executor.REJECT_CODE_OVERLOADED)
    long = [{"role": "user", "content": "x" * 1_000}]
    refused = await client.http.post(URL, json=chat_body(messages=long), headers=bearer(BOB))
    executor.script.reject = None
    taken = await client.http.post(URL, json=chat_body(), headers=bearer(BOB))

    assert (refused.status_code, taken.status_code) == (429, 200)


async def test_one_token_left_is_enough_for_a_request(
    client: Client, executor: FakeExecutor
) -> None:
    executor.script.texts = ("Hello", " world")  # one token less
    statuses = [
        (await client.http.post(URL, json=chat_body(), headers=bearer(BOB))).status_code
        for _ in range(3)
    ]

    assert statuses == [200, 200, 429]


def chat(client: Client, key: str = "", request_id: str = "r") -> "aio.UnaryStreamCall":
    request = pb.ChatRequest(model=MODEL, messages=[gen.ChatMessage(role="user", content="Hi.")])
    metadata = [("x-request-id", request_id)]
    metadata += [("authorization", f"Bearer {key}")] if key else []
    return pb_grpc.GatewayServiceStub(client.channel).Chat(request, metadata=metadata)


async def test_grpc_asks_for_the_same_keys(client: Client, executor: FakeExecutor) -> None:
    with pytest.raises(aio.AioRpcError) as refused:
        async for _ in chat(client):
            pass
    with pytest.raises(aio.AioRpcError) as refused_unary:
        await pb_grpc.GatewayServiceStub(client.channel).ListModels(pb.ListModelsRequest())
    answers = [answer async for answer in chat(client, CAROL)]

    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert refused_unary.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert dict(refused.value.trailing_metadata())["error-reason"] == "INVALID_API_KEY"
    assert answers[-1].finish.usage.num_output_tokens == 3
    assert len(executor.submits) == 1


async def test_reflection_needs_a_key_and_health_none(client: Client) -> None:
    reflection = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    with pytest.raises(aio.AioRpcError) as refused:
        await reflection.ServerReflectionInfo(iter([ask]), timeout=EVENT_TIMEOUT_S).read()
    metadata = [("authorization", f"Bearer {CAROL}")]
    call = reflection.ServerReflectionInfo(iter([ask]), metadata=metadata)
    listed = (await call.read()).list_services_response.service
    health = health_pb2_grpc.HealthStub(client.channel)

    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert "evenflow.gateway.v1.GatewayService" in {service.name for service in listed}
    assert await health.Check(health_pb2.HealthCheckRequest())


async def test_grpc_counts_against_the_same_limits(client: Client) -> None:
    assert [answer async for answer in chat(client, BOB)]
    with pytest.raises(aio.AioRpcError) as refused:
        async for _ in chat(client, BOB):
            pass
    over_http = await client.http.post(URL, json=chat_body(), headers=bearer(BOB))

    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert over_http.status_code == 429


async def test_nobody_cancels_what_another_key_has_asked_for(
    client: Client, executor: FakeExecutor
) -> None:
    executor.script.ending.clear()
    call = chat(client, CAROL, request_id="carols")
    await executor.until(lambda: len(executor.submits) == 1)
    stub = pb_grpc.GatewayServiceStub(client.channel)
    cancel = pb.CancelRequest(request_id="carols")
    with pytest.raises(aio.AioRpcError) as refused:
        await stub.Cancel(cancel, metadata=[("authorization", f"Bearer {ALICE}")])
    await stub.Cancel(cancel, metadata=[("authorization", f"Bearer {CAROL}")])
    answers = [answer async for answer in call]

    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    assert answers[-1].finish.reason == gen.FINISH_REASON_CANCELLED


async def test_tenants_may_give_requests_the_same_name(
    client: Client, executor: FakeExecutor
) -> None:
    executor.script.ending.clear()
    calls = {key: chat(client, key, request_id="same") for key in (ALICE, CAROL)}
    await executor.until(lambda: len(executor.submits) == 2)
    stub = pb_grpc.GatewayServiceStub(client.channel)
    cancel = pb.CancelRequest(request_id="same")
    await stub.Cancel(cancel, metadata=[("authorization", f"Bearer {ALICE}")])
    cancelled = [answer async for answer in calls[ALICE]]
    executor.script.ending.set()
    undisturbed = [answer async for answer in calls[CAROL]]

    assert {submit.cache_salt for submit in executor.submits} == {"alice", "carol"}
    assert cancelled[-1].finish.reason == gen.FINISH_REASON_CANCELLED
    assert undisturbed[-1].finish.reason == gen.FINISH_REASON_STOP


async def test_preparation_is_shared_among_keys_whatever_their_salts(
    client: Client, executor: FakeExecutor
) -> None:
    assert [answer async for answer in chat(client, CAROL)]
    salted = chat_body(cache_salt="salt")
    await client.http.post(URL, json=salted, headers=bearer(ALICE))
    tokens = {"model": MODEL, "prompt": "Hi."}
    await client.http.post("/tokenize", json=tokens, headers=bearer(ALICE))
    ids = {"model": MODEL, "tokens": [97]}
    await client.http.post("/detokenize", json=ids, headers=bearer(CAROL))

    assert [submit.fair_key for submit in executor.submits] == ["carol", "alice"]
    assert [request.fair_key for request in executor.tokenized] == ["alice"]
    assert [request.fair_key for request in executor.detokenized] == ["carol"]


async def test_a_pool_is_shared_among_keys_or_the_ids_that_requests_state(
    client: Client, executor: FakeExecutor
) -> None:
    headers = ({}, {"x-evenflow-fairness-id": "team"}, {"x-llm-d-inference-fairness-id": "team"})
    for more in headers:
        await client.http.post(URL, json=chat_body(), headers=bearer(CAROL) | more)
    await client.http.post(URL, json=chat_body(), headers=bearer(ALICE) | headers[1])
    stub = pb_grpc.GatewayServiceStub(client.channel)
    request = pb.GenerateRequest(model=MODEL, text="Hi")
    metadata = [("authorization", f"Bearer {CAROL}"), ("x-evenflow-fairness-id", "by gRPC")]
    assert [answer async for answer in stub.Generate(request, metadata=metadata)]

    ids = ["carol", "team", "team", "alice", "by gRPC"]  # alice may state none
    assert [submit.fairness_id for submit in executor.submits] == ids


async def test_without_keys_preparation_is_shared_among_addresses(executor: FakeExecutor) -> None:
    async with gateway_for(executor) as client:
        await client.wait_ready()
        assert [answer async for answer in chat(client)]
        await client.http.post(URL, json=chat_body())
        await client.http.post("/tokenize", json={"model": MODEL, "prompt": "Hi."})

    assert [submit.fair_key for submit in executor.submits] == ["127.0.0.1"] * 2
    assert [submit.cache_salt for submit in executor.submits] == [""] * 2
    assert [submit.fairness_id for submit in executor.submits] == [""] * 2
    assert [request.fair_key for request in executor.tokenized] == ["127.0.0.1"]


async def test_a_key_whose_limits_change_still_cancels_what_it_has_asked_for(
    client: Client, executor: FakeExecutor, tmp_path: Path
) -> None:
    executor.script.ending.clear()
    call = chat(client, CAROL, request_id="carols")
    await executor.until(lambda: len(executor.submits) == 1)
    dave = f'[[keys]]\nname = "dave"\nkey = "{DAVE}"\n'
    written(tmp_path, f"{KEYS}max_live_requests = 7\n{dave}")
    await eventually(lambda: models_status(client, DAVE), 200)  # the file was read again
    cancel = pb.CancelRequest(request_id="carols")
    stub = pb_grpc.GatewayServiceStub(client.channel)
    await stub.Cancel(cancel, metadata=[("authorization", f"Bearer {CAROL}")])
    answers = [answer async for answer in call]

    assert answers[-1].finish.reason == gen.FINISH_REASON_CANCELLED


async def test_log_lines_and_token_counts_name_the_key(client: Client) -> None:
    before = [counted(kind) for kind in ("prompt", "output")]
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as lines:
        await client.http.post(URL, json=chat_body(), headers=bearer(CAROL))
        assert [answer async for answer in chat(client, CAROL)]
        await client.wait_idle()
        await client.http.get("/v1/models", headers=bearer(BOB))
    after = [counted(kind) for kind in ("prompt", "output")]

    named = {(line["event"], line.get("api_key")) for line in lines}
    assert {("http_served", "carol"), ("rpc_served", "carol"), ("request_ended", "carol")} <= named
    assert ("http_served", "bob") in named
    assert [b - a for a, b in zip(before, after, strict=True)] == [2 * NUM_PROMPT_TOKENS, 2 * 3]
    assert CAROL not in str(lines)


@pytest.mark.logs("api_keys_not_read", "api_keys_read")
async def test_keys_in_redis_are_followed_and_outlive_it(executor: FakeExecutor) -> None:
    async def status(key: str) -> int:
        return await models_status(client, key)

    with RedisServer() as server:
        store = redis.Redis.from_url(server.url)
        options = {"api_keys_redis_url": server.url, "api_keys_refresh_s": 0.1}
        async with gateway_for(executor, **options) as client:
            await client.wait_ready()
            assert await status(ALICE) == 503  # nobody knows whether it is good
            with pytest.raises(aio.AioRpcError) as refused:
                await pb_grpc.GatewayServiceStub(client.channel).ListModels(pb.ListModelsRequest())
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            store.set(REDIS_KEY, KEYS)
            await eventually(lambda: status(ALICE), 200)
            server.freeze()
            assert [await status(ALICE), await status("sk-nobody-0123456789")] == [200, 401]
            server.thaw()
            store.set(REDIS_KEY, KEYS.replace(ALICE, "sk-alice-changed-0123"))
            await eventually(lambda: status(ALICE), 401)
            server.kill()
            await asyncio.sleep(0.5)  # some rounds without Redis
            assert [await status(BOB), await status(ALICE)] == [200, 401]


async def test_a_file_is_followed(executor: FakeExecutor, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)

    async def status() -> int:
        return (await client.http.get("/v1/models", headers=bearer(ALICE))).status_code

    async with gateway_for(executor, api_keys_file=file, api_keys_refresh_s=0.1) as client:
        await eventually(status, 200)
        file.write_text(KEYS.replace(ALICE, "sk-alice-changed-0123"))
        await eventually(status, 401)


async def eventually(ask: Callable[[], Awaitable[int]], answer: int) -> None:
    """Ask until the answer is this one."""
    async with asyncio.timeout(EVENT_TIMEOUT_S):
        while await ask() != answer:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_without_a_file_nobody_is_asked(executor: FakeExecutor) -> None:
    async with gateway_for(executor) as client:
        await client.wait_ready()
        answer = await client.http.post(URL, json=chat_body(), headers=bearer("anything"))

    assert answer.status_code == 200


async def test_anthropic_s_clients_show_their_key_in_a_header_of_their_own(client) -> None:
    asked = {"model": MODEL, "max_tokens": 5, "messages": chat_body()["messages"]}
    async with anthropic.AsyncAnthropic(
        base_url=client.base_url, api_key=BOB, max_retries=0
    ) as bob:
        await bob.messages.create(**asked)
        with pytest.raises(anthropic.RateLimitError) as used_up:
            await bob.messages.create(**asked)
    async with anthropic.AsyncAnthropic(base_url=client.base_url, api_key="sk-nobody") as nobody:
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await nobody.messages.create(**asked)

    assert used_up.value.body["error"]["type"] == "rate_limit_error"
    assert unknown.value.body["error"]["type"] == "authentication_error"


async def test_ids_that_a_client_sends_again_count_as_its_prompt_does(client: Client) -> None:
    before = [counted(kind) for kind in ("prompt", "output")]
    body = chat_body(evenflow={"resume": {"token_ids": [100, 101]}})
    answer = await client.http.post(URL, json=body, headers=bearer(CAROL))
    await client.wait_idle()
    after = [counted(kind) for kind in ("prompt", "output")]

    assert answer.json()["choices"][0]["message"]["content"] == " world"
    assert [b - a for a, b in zip(before, after, strict=True)] == [NUM_PROMPT_TOKENS + 2, 1]
