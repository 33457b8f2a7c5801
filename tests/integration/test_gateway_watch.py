"""`/v1/evenflow/watch`: engines at work, as server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import generation_pb2 as gen
from services.gateway.executors.watches import MAX_WATCHERS
from tests.fake_executor import MODEL, FakeExecutor
from tests.gateways import Client, gateway_for, until

WATCH = "/v1/evenflow/watch"
KEYS = '[[keys]]\nname = "alice"\nkey = "a-good-key-of-thirty-two-characters"\n'
GOOD = {"authorization": "Bearer a-good-key-of-thirty-two-characters"}
REQUEST = pb.ObservedRequest(
    request_id="long:0123456789abcdef",
    state=pb.REQUEST_STATE_PARKED,
    num_prompt_tokens=1,
    num_computed_tokens=2,
    num_generated_tokens=3,
    num_delivered_tokens=4,
    num_deposited_tokens=5,
    num_late_tokens=6,
    release_interval_s=0.5,
    residency=[pb.RESIDENCY_RESIDENT, pb.RESIDENCY_OFFLOADED, pb.RESIDENCY_RESTORING],
    late_cause=gen.DELAY_CAUSE_QUEUE,
    why="in_hand",
    why_text="its reader has enough in hand",
)
OBSERVED = pb.WatchRequestsResponse(
    requests=[REQUEST, pb.ObservedRequest(request_id="short", state=pb.REQUEST_STATE_DECODING)],
    num_steps=7,
    observed_step_s=0.25,
    predicted_step_s=0.5,
    num_pool_blocks=8,
    num_free_pool_blocks=9,
    num_cached_tokens=10,
    num_host_blocks=11,
    num_free_host_blocks=12,
    link_bytes_per_s=13.0,
    tokens_per_step=2.5,
    prefixes=[
        pb.ObservedPrefix(
            request_ids=["short"], num_tokens=14, residency=[pb.RESIDENCY_RESIDENT] * 2
        )
    ],
)


async def updates(response: httpx.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        if line:
            yield json.loads(line.removeprefix("data: "))


async def test_all_that_an_executor_tells_arrives(client: Client, executor: FakeExecutor) -> None:
    executor.observed = OBSERVED
    async with client.http.stream("GET", WATCH, params={"max_updates_per_s": 20}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        told = await anext(updates(response))

    first, second = told["requests"]
    names = {field.name for field in pb.ObservedRequest.DESCRIPTOR.fields} - {"pace_tail"}
    assert first.keys() == second.keys() == names
    assert first["residency"] == "ROB"
    assert first["late_cause"] == "queue"
    assert (first["state"], second["state"]) == ("parked", "decoding")
    assert second["late_cause"] is None
    for name in names - {"request_id", "residency", "late_cause", "state"}:
        assert first[name] == getattr(REQUEST, name)
    assert first["request_id"] == "long"
    assert told["prefixes"] == [{"request_ids": ["short"], "num_tokens": 14, "residency": "RR"}]
    fields = {field.name for field in pb.WatchRequestsResponse.DESCRIPTOR.fields}
    assert told.keys() == fields | {"executor", "is_connected", "model"}
    for name in fields - {"requests", "prefixes"}:
        assert told[name] == getattr(OBSERVED, name)
    assert (told["executor"], told["model"]) == (executor.address, MODEL)
    assert told["is_connected"] is True
    assert executor.watched_at == [20.0]


async def test_an_engine_is_watched_only_while_somebody_looks(
    client: Client, executor: FakeExecutor
) -> None:
    assert executor.num_watchers == 0
    async with client.http.stream("GET", WATCH) as response:
        told = await anext(updates(response))
        assert executor.num_watchers == 1
        # Nothing is known before the first step.
        unset = ("predicted_step_s", "link_bytes_per_s", "tokens_per_step")
        assert [told[name] for name in unset] == [None] * 3

    await until(lambda: executor.num_watchers == 0)
    assert executor.watched_at == [2.0]


async def test_that_an_executor_is_gone_is_told_and_that_it_is_back(
    client: Client, executor: FakeExecutor
) -> None:
    async with client.http.stream("GET", WATCH, params={"max_updates_per_s": 20}) as response:
        told = updates(response)
        assert (await anext(told))["is_connected"]
        await executor.kill()
        while (news := await anext(told))["is_connected"]:
            pass
        assert news == {"executor": executor.address, "is_connected": False}
        await executor.start()
        while not (await anext(told))["is_connected"]:
            pass


async def test_with_keys_a_key_is_needed(executor: FakeExecutor, tmp_path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    async with gateway_for(executor, api_keys_file=tmp_path / "keys.toml") as client:
        await client.wait_ready()
        assert (await client.http.get(WATCH)).status_code == 401
        async with client.http.stream("GET", WATCH, headers=GOOD) as response:
            assert (await anext(updates(response)))["model"] == MODEL


async def test_so_many_may_watch_and_no_more(client: Client, executor: FakeExecutor) -> None:
    async with asyncio.TaskGroup() as tasks:
        watching = [tasks.create_task(hold_open(client)) for _ in range(MAX_WATCHERS)]
        await until(lambda: executor.num_watchers == MAX_WATCHERS)

        assert (await client.http.get(WATCH)).status_code == 429
        for task in watching:
            task.cancel()
    await until(lambda: executor.num_watchers == 0)
    assert (await client.http.head(WATCH)).status_code == 200
    assert executor.num_watchers == 0


async def hold_open(client: Client) -> None:
    async with client.http.stream("GET", WATCH) as response:
        async for _ in response.aiter_bytes():
            pass


@pytest.mark.parametrize("rate", ["0", "-1", "20.5", "nan", "inf", "often", ""])
async def test_a_rate_that_is_none_is_refused(client: Client, rate: str) -> None:
    response = await client.http.get(WATCH, params={"max_updates_per_s": rate})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_updates_per_s"


async def test_a_watch_ends_with_the_gateway(executor: FakeExecutor) -> None:
    async with gateway_for(executor) as client:
        await client.wait_ready()
        async with client.http.stream("GET", WATCH, params={"max_updates_per_s": 20}) as response:
            told = updates(response)
            await anext(told)
            client.gateway.dispatcher.start_leaving()
            async for _ in told:
                pass
