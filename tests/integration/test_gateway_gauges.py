"""What a gateway's metrics say of its executors, read by an endpoint picker and autoscalers."""

import asyncio
import time
from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from evenflow.executor.v1 import executor_pb2 as pb
from services.gateway.executors.routing import UNMEASURED_TPS
from tests.endpoint_picker import ADAPTERS, CACHE, KV_USE, RUNNING, WAITING, Pod, read_pod
from tests.fake_executor import MODEL, NUM_PROMPT_TOKENS, FakeExecutor
from tests.gateways import Client, gateway_with, stream_body, until

WAIT = "evenflow_executor_newcomer_wait_seconds"
READING = "evenflow_executor_reading_load_frac"
LOAD = pb.Load(
    num_running_reqs=5,
    num_newcomers=3,
    num_newcomer_tokens=900,
    prefill_tps=300,
    kv_unavailable_frac=0.75,
    deposit_s=4,
    reading_load_frac=0.5,
)


async def page(client: Client) -> str:
    return (await client.http.get("/metrics")).text


async def values(client: Client, name: str) -> Mapping[str, float]:
    """Return a gauge's value by executor."""
    families = text_string_to_metric_families(await page(client))
    samples = [sample for family in families if family.name == name for sample in family.samples]
    assert all(one.labels["model_name"] == MODEL for one in samples)
    return {sample.labels["executor"]: sample.value for sample in samples}


async def told(client: Client, executor: FakeExecutor, load: pb.Load) -> None:
    """Have an executor tell its load, and wait until the gateway has it."""
    await until(lambda: executor.session is not None)
    executor.session.send(load=load)
    (link,) = (
        one
        for one in client.gateway.dispatcher.placing._links.values()
        if one.address == executor.address
    )

    def has_it() -> bool:
        known = link.candidate()
        return (
            known is not None
            and known.load is not None
            and known.load.num_newcomers == load.num_newcomers
            and known.load.num_running_reqs == load.num_running_reqs
        )

    await until(has_it)


def start(client: Client, model: str) -> "asyncio.Task[object]":
    return asyncio.create_task(
        client.http.post("/v1/chat/completions", json=stream_body(model=model))
    )


async def test_a_picker_reads_what_an_executor_tells(client: Client, executor) -> None:
    with pytest.raises(LookupError):  # nothing is said of what is not known
        read_pod(await page(client))
    await told(client, executor, LOAD)

    assert read_pod(await page(client)) == Pod(
        num_waiting=3,
        num_running=5,
        kv_use_frac=0.75,
        block_size=16,
        num_blocks=125,  # 1,000 blocks of one of 8 layers
        max_adapters=0,
        running_adapters=frozenset(),
        waiting_adapters=frozenset(),
    )
    assert await values(client, WAIT) == {executor.executor_id: 900 / 300}
    assert await values(client, READING) == {executor.executor_id: 0.5}


async def test_gauges_follow_an_executor_and_go_with_it(client: Client, executor) -> None:
    await told(client, executor, LOAD)
    await told(client, executor, pb.Load())

    for name in (WAITING, RUNNING, KV_USE, WAIT, READING):
        assert await values(client, name) == {executor.executor_id: 0}, name
    await executor.kill()
    await until(lambda: not client.gateway.dispatcher.is_ready)
    for name in (WAITING, RUNNING, KV_USE, WAIT, READING, CACHE, ADAPTERS):
        assert await values(client, name) == {}, name
    await executor.start()
    await client.wait_ready()


async def test_a_leaving_executor_is_not_told_of(client: Client, executor) -> None:
    """It takes nothing, so that what is before a newcomer there says nothing."""
    await told(client, executor, LOAD)
    executor.session.is_leaving = True
    executor.session.send()
    await until(lambda: not client.gateway.dispatcher.is_ready)

    assert await values(client, WAITING) == {}


async def test_prompts_that_no_report_has_yet_are_waited_for(client: Client, executor) -> None:
    await told(client, executor, pb.Load(num_running_reqs=1))
    executor.script.accepting.clear()
    stream = start(client, MODEL)
    await executor.until(lambda: bool(executor.submits))
    (waiting,) = (await values(client, WAIT)).values()
    executor.script.accepting.set()
    await stream

    assert 0 < waiting < 100 * NUM_PROMPT_TOKENS / UNMEASURED_TPS


async def test_parked_readers_are_no_queue(client: Client, executor) -> None:
    """As an executor's front tells them: tests/unit/executor/serving/test_front.py."""
    executor.script.ending.clear()
    readers = [start(client, MODEL) for _ in range(8)]
    await until(lambda: client.num_generated() == [3] * 8)
    await told(client, executor, pb.Load(num_running_reqs=4, kv_unavailable_frac=1, deposit_s=30))

    pod = read_pod(await page(client))
    (wait_s,) = (await values(client, WAIT)).values()
    executor.script.ending.set()
    await asyncio.gather(*readers)

    assert (pod.num_waiting, pod.num_running, pod.kv_use_frac) == (0, 4, 1)
    assert wait_s == 0


async def test_each_executor_has_its_own() -> None:
    first, second = (FakeExecutor(executor_id=f"executor-{k}") for k in range(2))
    async with gateway_with(first, second) as client:
        await told(client, first, LOAD)
        await told(client, second, pb.Load(num_newcomers=1, reading_load_frac=1))

        assert await values(client, WAITING) == {"executor-0": 3, "executor-1": 1}
        assert await values(client, READING) == {"executor-0": 0.5, "executor-1": 1}


async def test_adapters_run_or_wait_with_their_requests() -> None:
    adapters = [pb.Adapter(model=name) for name in ("a", "b", "c")]
    executor = FakeExecutor(adapters=adapters)
    began_s = time.time()
    async with gateway_with(executor) as client:
        await told(client, executor, LOAD)
        executor.script.ending.clear()
        streams = [start(client, "a"), start(client, MODEL)]
        await until(lambda: client.num_generated() == [3, 3])
        executor.script.generating.clear()
        streams += [start(client, "a"), start(client, "b")]
        await executor.until(lambda: len(executor.submits) == 4)

        pod = read_pod(await page(client))
        stamped_s = await values(client, ADAPTERS)
        executor.script.generating.set()
        executor.script.ending.set()
        await asyncio.gather(*streams)
        await client.wait_idle()
        idle = read_pod(await page(client))

    assert pod.max_adapters == 2
    assert (pod.running_adapters, pod.waiting_adapters) == ({"a"}, {"b"})
    assert all(began_s <= at_s <= time.time() for at_s in stamped_s.values())
    assert (idle.running_adapters, idle.waiting_adapters) == (set(), set())


async def test_an_adapter_runs_where_its_request_is() -> None:
    adapters = [pb.Adapter(model="a")]
    executors = [FakeExecutor(executor_id=f"executor-{k}", adapters=adapters) for k in range(2)]
    async with gateway_with(*executors) as client:
        for executor in executors:
            await told(client, executor, pb.Load())
            executor.script.ending.clear()
        stream = start(client, "a")
        await until(lambda: client.num_generated() == [3])
        families = text_string_to_metric_families(await page(client))
        samples = [one for family in families if family.name == ADAPTERS for one in family.samples]
        for executor in executors:
            executor.script.ending.set()
        await stream

    running = {
        one.labels["executor"]: one.labels["running_lora_adapters"] == "a" for one in samples
    }
    assert running == {one.executor_id: bool(one.submits) for one in executors}
    assert sorted(running.values()) == [False, True]
