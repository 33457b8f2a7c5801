"""Executors that a gateway finds by their leases, and what the tracker shows of the fleet."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cli.client.endpoint import RefusedError, endpoint_at
from cli.client.fleet import read_fleet
from evenflow.tracker.v1 import tracker_pb2 as pb
from evenflow.tracker.v1.tracker_pb2_grpc import TrackerServiceStub
from services.executor.serving.tracker_client import TrackerClient
from services.gateway.app import run_gateway
from services.gateway.settings import GatewaySettings
from services.generation.lifecycle import RequestStatus
from services.kit.rpc import make_channel
from services.reporting.load import ExecutorLoad
from tests.fake_executor import MODEL, NUM_PROMPT_TOKENS, FakeExecutor
from tests.gateways import (
    Client,
    chat_body,
    connect,
    gateway_for,
    make_settings,
    started,
    stream_body,
    until,
)
from tests.integration.memory_tracker import Tracker

URL, FLEET = "/v1/chat/completions", "/v1/evenflow/fleet"
LOAD = ExecutorLoad(num_running_reqs=2, prefill_tps=100.0, deposit_s=1.5, reading_load_frac=0.25)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.executors.fleet.LOOK_INTERVAL_S", 0.02)
    monkeypatch.setattr("services.executor.serving.tracker_client.RETRY_S", 0.05)


@pytest.fixture
async def tracker() -> AsyncIterator[Tracker]:
    tracker = Tracker()
    await tracker.start()
    yield tracker
    await tracker.kill()


@pytest.fixture
async def client(tracker: Tracker) -> AsyncIterator[Client]:
    settings = make_settings(executors="tracker:", tracker=tracker.address)
    async with run_gateway(settings) as gateway, connect(gateway) as client:
        yield client


@asynccontextmanager
async def leased(executor: FakeExecutor, tracker: Tracker) -> AsyncIterator[TrackerClient]:
    """Hold a lease for an executor, with the client that executors have."""
    async with make_channel(tracker.address) as channel:
        lease = TrackerClient(channel, executor_id=executor.executor_id, epoch=1)
        running = asyncio.create_task(
            lease.run(address=executor.address, model=MODEL, get_load=lambda: LOAD)
        )
        try:
            yield lease
        finally:
            running.cancel()
            await asyncio.wait([running])


def links_of(client: Client) -> set[str]:
    return set(client.gateway.dispatcher.placing._links)


async def ask(client: Client, num_times: int = 2) -> list[int]:
    answers = [await client.http.post(URL, json=chat_body()) for _ in range(num_times)]
    return [answer.status_code for answer in answers]


async def test_executors_that_hold_a_lease_get_requests_and_others_go(client, tracker) -> None:
    first, second = (FakeExecutor(executor_id=f"e{k}") for k in range(2))
    async with started(first, second):
        assert (await client.http.get("/ready")).status_code == 503
        async with leased(first, tracker), leased(second, tracker) as lease:
            await until(lambda: len(client.gateway.dispatcher.placing._candidates()) == 2)
            assert await ask(client) == [200, 200]
            await lease.release()
            await second.kill()
        await until(lambda: links_of(client) == {first.address})
        assert await ask(client) == [200, 200]

    assert (len(first.submits), len(second.submits)) == (3, 1)


async def test_a_tracker_that_is_gone_or_has_forgotten_all_costs_no_executor(
    client, tracker
) -> None:
    executor = FakeExecutor()
    async with started(executor):
        async with leased(executor, tracker):
            await client.wait_ready()
        await tracker.kill()
        assert await ask(client) == [200, 200]
        await tracker.start()
        async with make_channel(tracker.address) as channel:
            listed = await TrackerServiceStub(channel).ListExecutors(pb.ListExecutorsRequest())
        assert not listed.executors
        # A lease that is taken now shows when the gateway has seen that the first one is not there.
        other = FakeExecutor(executor_id="other")
        async with started(other), leased(other, tracker):
            await until(lambda: other.address in links_of(client))
            assert executor.address in links_of(client)
            assert await ask(client) == [200, 200]

    assert len(executor.gateway_ids) == 1


async def test_the_fleet_is_shown_with_its_requests_and_buffers(client, tracker) -> None:
    executor = FakeExecutor()
    async with started(executor), leased(executor, tracker) as lease:
        await client.wait_ready()
        assert await ask(client, 1) == [200]
        ended = executor.submits.pop().request_id
        lease.note(ended, generation=1, num_generated=3, status=RequestStatus.FINISHED)
        while not await tracker.has_only(pb.REQUEST_STATE_FINISHED):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        executor.script.ending.clear()
        body = stream_body(evenflow={"slo_tbt_ms": 3_600_000})
        headers = {"x-request-id": "r"}
        stream = asyncio.create_task(client.http.post(URL, json=body, headers=headers))
        await tracker.until_delivered("r", 1)
        (submit,) = executor.submits
        lease.note(
            submit.request_id,
            generation=1,
            num_generated=3,
            status=RequestStatus.DECODING,
        )
        shown: list[dict] = []

        async def has_deposit() -> bool:
            shown[:] = (await client.http.get(FLEET)).json()["executors"]
            return any(one["num_deposited_tokens"] for entry in shown for one in entry["requests"])

        while not await has_deposit():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        by_command = await asyncio.to_thread(read_fleet, endpoint_at(client.base_url))
        executor.script.ending.set()
        client.gateway.dispatcher.fail_all()
        await stream

    assert [one["requests"] for one in by_command] == [one["requests"] for one in shown]
    (entry,) = shown
    assert 0 < entry.pop("lease_ttl_s") <= 60
    assert entry == {
        "executor_id": "executor-0",
        "address": executor.address,
        "model": MODEL,
        "load": {
            "num_running_reqs": 2,
            "num_newcomers": 0,
            "num_newcomer_tokens": 0,
            "prefill_tps": 100.0,
            "kv_unavailable_frac": 0.0,
            "deposit_s": 1.5,
            "reading_load_frac": 0.25,
        },
        "requests": [
            {
                "request_id": "r",
                "gateway_id": "gateway-under-test",
                "state": "decoding",
                "num_prompt_tokens": NUM_PROMPT_TOKENS,
                "num_generated_tokens": 3,
                "num_delivered_tokens": 1,
                "num_deposited_tokens": 2,
            }
        ],
    }


async def test_without_a_tracker_no_fleet_is_shown(executor) -> None:
    async with gateway_for(executor) as client:
        answer = await client.http.get(FLEET)
        with pytest.raises(RefusedError, match="has no tracker"):
            await asyncio.to_thread(read_fleet, endpoint_at(client.base_url))

    assert answer.status_code == 503
    assert "has no tracker" in answer.json()["error"]["message"]


def test_a_tracker_that_is_to_tell_must_be_there() -> None:
    with pytest.raises(ValueError, match='executors has "tracker:"'):
        GatewaySettings.model_validate({"executors": "tracker:", "tracker": ""})
