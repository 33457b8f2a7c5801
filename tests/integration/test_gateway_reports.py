"""What the gateway tells a real tracker, and how little it minds one that is away."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest

from evenflow.gateway.v1 import generation_pb2 as gen
from services.reporting import reporter
from services.reporting.reporter import ReporterOptions
from tests.fake_executor import EVENT_TIMEOUT_S, NUM_PROMPT_TOKENS, Script
from tests.gateways import chat_body, gateway_for, stream_body
from tests.integration.memory_tracker import Tracker


@pytest.fixture
async def tracker() -> AsyncIterator[Tracker]:
    tracker = Tracker()
    await tracker.start()
    yield tracker
    await tracker.kill()


@pytest.mark.parametrize("stream", [True, False])
async def test_the_tracker_learns_what_was_routed_and_delivered(tracker, executor, stream) -> None:
    async with gateway_for(executor, tracker=tracker.address) as client:
        await client.wait_ready()
        await client.http.post(
            "/v1/chat/completions",
            json=chat_body(stream=stream, evenflow={"slo_tbt_ms": 50}),
            headers={"x-request-id": "r"},
        )
        record = await tracker.until_delivered("r", 3)

    assert record.gateway_id == "gateway-under-test"
    assert record.generation == executor.submits[0].generation
    assert record.num_prompt_tokens == NUM_PROMPT_TOKENS
    assert record.service_level == gen.ServiceLevel(slo_tbt_s=0.05)


async def test_only_what_was_written_counts(tracker, executor) -> None:
    executor.script = Script(texts=["x"] * 9)
    executor.script.ending.clear()
    async with gateway_for(executor, tracker=tracker.address) as client:
        await client.wait_ready()
        async with client.http.stream(
            "POST",
            "/v1/chat/completions",
            json=stream_body(evenflow={"slo_tbt_ms": 3_600_000}),
            headers={"x-request-id": "r"},
        ):
            await tracker.until_delivered("r", 1)


async def test_a_request_that_was_refused_is_not_recorded(tracker, executor) -> None:
    async with gateway_for(executor, tracker=tracker.address) as client:
        await client.wait_ready()
        await client.http.post("/v1/chat/completions", json=chat_body(model="other"))
        await client.http.post(
            "/v1/chat/completions", json=chat_body(), headers={"x-request-id": "r"}
        )
        await tracker.until_delivered("r", 3)

        assert [name for name, _ in await tracker.records()] == ["r"]


async def test_a_reused_id_starts_a_record_of_its_own(tracker, executor) -> None:
    async with gateway_for(executor, tracker=tracker.address) as client:
        await client.wait_ready()
        for texts in (["x"] * 5, ["x"] * 2):
            executor.script = Script(texts=texts)
            await client.http.post(
                "/v1/chat/completions", json=chat_body(), headers={"x-request-id": "r"}
            )
            record = await tracker.until_delivered("r", len(texts))

    assert record.request_id == executor.submits[1].request_id
    assert len(await tracker.records()) == 2


async def test_a_tracker_that_is_away_slows_nothing_and_is_told_later(tracker, executor) -> None:
    await tracker.kill()
    async with gateway_for(executor, tracker=tracker.address) as client:
        await client.wait_ready()
        answer = await client.http.post(
            "/v1/chat/completions", json=stream_body(), headers={"x-request-id": "r"}
        )
        await tracker.start()
        record = await tracker.until_delivered("r", 3)

    assert answer.text.endswith("data: [DONE]\n\n")
    assert record.num_prompt_tokens == NUM_PROMPT_TOKENS


async def test_a_tracker_that_forgot_everything_is_told_again(tracker, executor) -> None:
    executor.script.ending.clear()
    async with gateway_for(executor, tracker=tracker.address) as client:
        await client.wait_ready()
        stream = asyncio.create_task(
            client.http.post(
                "/v1/chat/completions", json=stream_body(), headers={"x-request-id": "r"}
            )
        )
        await tracker.until_delivered("r", 3)
        await tracker.kill()
        await tracker.start()
        executor.script.ending.set()
        await stream

        await tracker.until_delivered("r", 3)


async def test_the_last_counts_are_sent_at_shutdown(tracker, executor, monkeypatch) -> None:
    patient = partial(ReporterOptions, rpc_timeout_s=EVENT_TIMEOUT_S)
    monkeypatch.setattr(reporter, "ReporterOptions", patient)
    settings = {"tracker": tracker.address, "tracker_flush_timeout_s": EVENT_TIMEOUT_S}
    async with gateway_for(executor, **settings) as client:
        await client.wait_ready()
        await client.http.post(
            "/v1/chat/completions", json=chat_body(), headers={"x-request-id": "r"}
        )

    ((name, record),) = await tracker.records()
    assert (name, record.num_delivered_tokens) == ("r", 3)
