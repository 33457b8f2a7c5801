"""Any sequence of operations leaves the in-memory store and real Redis with the same answers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import pytest
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab.memory_tracker_store import MemoryTrackerStore
from lab.stack.redis_server import RedisServer
from services.generation.lifecycle import RequestStatus
from services.kit.errors import ServiceError
from services.pacing.types import ServiceLevel
from services.reporting.load import ExecutorLoad
from services.tracker.redis.store import RedisTrackerStore
from services.tracker.store import TrackerStore
from services.tracker.types import (
    DeliveredProgress,
    ExecutorId,
    ExecutorOffer,
    ExecutorWriter,
    GatewayId,
    GatewayWriter,
    GeneratedProgress,
    Lifetimes,
    Registration,
    RequestId,
    RequestKey,
)
from tests.fuzz import examples

Operation: TypeAlias = Callable[[TrackerStore], Awaitable[Any]]

LIFETIMES = Lifetimes(lease_ttl_s=5.0, request_ttl_s=8.0, retention_s=12.0)
EXECUTORS = [ExecutorId("ex0"), ExecutorId("ex1")]
BASE_EPOCH = 1_800_000_000_000_001

executor_ids = st.sampled_from(EXECUTORS)
epochs = st.integers(BASE_EPOCH, BASE_EPOCH + 2)
generations = st.integers(1, 3)
counts = st.none() | st.integers(0, 5)
states = st.sampled_from(RequestStatus)
keys = st.builds(
    RequestKey,
    executor_id=executor_ids,
    request_id=st.sampled_from([RequestId("a"), RequestId("b"), RequestId("ü{}")]),
)
loads = st.builds(
    ExecutorLoad,
    num_running_reqs=st.integers(0, 3),
    num_newcomers=st.integers(0, 3),
    kv_unavailable_frac=st.floats(0, 1),
)
offers = st.builds(
    ExecutorOffer,
    executor_id=executor_ids,
    epoch=epochs,
    address=st.just("host:1"),
    model=st.sampled_from(["m", "n"]),
    load=loads,
)
executors = st.builds(ExecutorWriter, executor_id=executor_ids, epoch=epochs)
gateways = st.builds(
    GatewayWriter, gateway_id=st.sampled_from([GatewayId("g"), GatewayId("h")]), epoch=epochs
)
registrations = st.builds(
    Registration,
    key=keys,
    generation=generations,
    num_prompt_tokens=st.integers(1, 2**31 - 1),
    service_level=st.builds(
        ServiceLevel, slo_tbt_s=st.none() | st.floats(1e-6, 1e6), pace_tail=st.booleans()
    ),
)
generated = st.builds(
    GeneratedProgress,
    request_id=keys.map(lambda key: key.request_id),
    generation=generations,
    num_generated_tokens=counts,
    state=st.none() | states,
)
delivered = st.builds(
    DeliveredProgress, key=keys, generation=generations, num_delivered_tokens=counts
)


def batches(entries: st.SearchStrategy[Any], key: Callable[[Any], Any]) -> Any:
    return st.lists(entries, min_size=1, max_size=4, unique_by=key)


operations = st.one_of(
    st.builds(lambda offer: lambda store: store.register_executor(offer), offers),
    st.builds(lambda w, load: lambda store: store.renew_lease(w, load), executors, loads),
    st.builds(lambda w: lambda store: store.release_lease(w), executors),
    st.builds(
        lambda g, batch: lambda store: store.register(g, batch),
        gateways,
        batches(registrations, lambda entry: entry.key),
    ),
    st.builds(
        lambda w, batch: lambda store: store.report_generated(w, batch),
        executors,
        batches(generated, lambda entry: entry.request_id),
    ),
    st.builds(
        lambda g, batch: lambda store: store.report_delivered(g, batch),
        gateways,
        batches(delivered, lambda entry: entry.key),
    ),
)
steps = st.lists(
    st.tuples(st.sampled_from([0.0, 0.0, 0.25, 3.0, 5.0, 8.0]), operations), max_size=25
)


async def outcome(store: TrackerStore, operation: Operation) -> Any:
    try:
        return await operation(store)
    except ServiceError as error:
        return error.reason


async def everything(store: TrackerStore) -> Any:
    return (
        await store.list_executors(),
        [await store.snapshot(executor_id) for executor_id in EXECUTORS],
    )


async def compare(url: str, script: list[tuple[float, Operation]]) -> None:
    now_s = [1_800_000_000.123457]
    memory = MemoryTrackerStore(LIFETIMES, clock=lambda: now_s[0])
    in_redis = RedisTrackerStore(url, LIFETIMES, clock=lambda: now_s[0], timeout_s=60.0)
    admin = redis.asyncio.Redis.from_url(url)
    await admin.flushall()
    try:
        for pause_s, operation in script:
            now_s[0] += pause_s
            assert await outcome(in_redis, operation) == await outcome(memory, operation)
            assert await everything(in_redis) == await everything(memory)
    finally:
        await admin.aclose()
        await in_redis.aclose()


@pytest.mark.timeout(3_600)
@settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(script=steps)
def test_both_stores_answer_alike(
    redis_server: RedisServer, script: list[tuple[float, Operation]]
) -> None:
    asyncio.run(compare(redis_server.url, script))
