"""Counts on their way to the scheduler; the call is the test's own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from services.executor.engine.reader_relay import INTERVAL_S, ReaderRelay

Calls = asyncio.Queue[dict[str, int]]


@asynccontextmanager
async def running(
    call: Callable[[dict[str, int]], Awaitable[object]],
) -> AsyncIterator[ReaderRelay[int]]:
    relay = ReaderRelay(call)
    task = asyncio.create_task(relay.run())
    try:
        yield relay
    finally:
        task.cancel()
        await asyncio.wait([task])


async def next_call(calls: Calls) -> dict[str, int]:
    return await asyncio.wait_for(calls.get(), timeout=60)


async def test_counts_of_all_requests_travel_in_one_call_with_the_newest_of_each() -> None:
    calls = Calls()
    async with running(calls.put) as relay:
        relay.note("a", 1)
        relay.note("b", 7)
        relay.note("a", 2)

        assert await next_call(calls) == {"a": 2, "b": 7}


async def test_two_calls_are_an_interval_apart() -> None:
    times_s: asyncio.Queue[float] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    async def call(counts: dict[str, int]) -> None:
        times_s.put_nowait(loop.time())
        relay.note("a", counts["a"] + 1)

    async with running(call) as relay:
        begin_s = loop.time()  # no later than the first call
        relay.note("a", 1)
        _, second_s = [await asyncio.wait_for(times_s.get(), 60) for _ in range(2)]

    assert second_s - begin_s >= 0.99 * INTERVAL_S


async def test_a_busy_engine_gets_one_call_with_all_that_came_meanwhile() -> None:
    calls, gate = Calls(), asyncio.Event()

    async def call(counts: dict[str, int]) -> None:
        calls.put_nowait(counts)
        await gate.wait()

    async with running(call) as relay:
        relay.note("a", 1)
        assert await next_call(calls) == {"a": 1}
        for num_delivered in range(2, 50):
            relay.note("a", num_delivered)
        relay.note("b", 1)
        gate.set()

        assert await next_call(calls) == {"a": 49, "b": 1}


@pytest.mark.logs("reader_news_lost")
async def test_a_failed_call_does_not_end_the_relay() -> None:
    calls = Calls()

    async def call(counts: dict[str, int]) -> None:
        calls.put_nowait(counts)
        raise RuntimeError("the engine is shutting down")

    async with running(call) as relay:
        relay.note("a", 1)
        await next_call(calls)
        relay.note("a", 2)

        assert await next_call(calls) == {"a": 2}
