"""Processes die, hang and come back: tokens are neither lost nor doubled, counts agree afterwards.

A hang is SIGSTOP: connections stay open, nobody answers. EVENFLOW_TEST_HANG_S=30 makes each as long
as that, with the keepalive of production (`make test-faults`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TypeAlias

import httpx
import pytest
from grpc import aio

from evenflow.tracker.v1 import tracker_pb2 as tracker_pb
from lab.models import MAX_MODEL_LEN
from lab.stack.processes import HANG_S, Stack, assert_gone, wait_until
from tests.clients import Received, http_chat, recorded
from tests.live_streams import Endings, Streams, assert_complete, num_in_engine

pytestmark = pytest.mark.timeout(3_600)

BACKGROUND = ("planner", "tracker", "redis")  # off the tokens' path
NUM_TOKENS = 300
MANY_TOKENS = MAX_MODEL_LEN - 512  # minutes: more than are generated before any fault
SLOW_TPS = 10.0
DEAD_S = 1.0
ALERT_KEEPALIVE_S = 10.0 if HANG_S >= 30 else 5.0
GIVEN_UP_S = 5 * ALERT_KEEPALIVE_S  # two, and slack

Running: TypeAlias = "asyncio.Task[Endings]"
Fault = Callable[[Stack, str], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def dead(stack: Stack, name: str) -> AsyncIterator[None]:
    """Kill a process, and start it again after the block."""
    kill, start = (
        (stack.redis.kill, stack.redis.start)
        if name == "redis"
        else (partial(stack.kill, name), partial(stack.launch, name))
    )
    await asyncio.to_thread(kill)
    yield
    await asyncio.to_thread(start)


@asynccontextmanager
async def hung(stack: Stack, name: str) -> AsyncIterator[None]:
    with stack.frozen(name):
        yield


@pytest.fixture(scope="module")
def alert_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that soon notices who hangs; only a machine with nothing else to do can have it."""
    stack = Stack(tmp_path_factory.mktemp("logs"), keepalive_s=ALERT_KEEPALIVE_S)
    try:
        stack.start_all()
        yield stack
    finally:
        stack.stop()


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list[Received]:
    """What each pair of streams gets when nothing happens."""
    calm = Streams(stack=stack, name="calm", max_tokens=NUM_TOKENS)
    return [rpc for _, rpc in asyncio.run(calm.run())]


@pytest.mark.parametrize(
    ("fault", "least_s", "life_s"),
    [
        pytest.param(dead, DEAD_S, 15.0, id="die"),
        pytest.param(hung, HANG_S, 3 * HANG_S + 9.0, id="hang", marks=pytest.mark.nightly),
    ],
)
async def test_planner_tracker_and_redis_may(
    stack: Stack, undisturbed: list[Received], fault: Fault, least_s: float, life_s: float
) -> None:
    """Some streams last longer than all faults, each of which waits until they have gone on; the
    others are read to their end.
    """
    name = fault.__name__
    lasting = Streams(
        stack=stack, name=f"{name}-lasting", max_tokens=MANY_TOKENS, rate_tps=40.0, num_pairs=2
    )
    streams = Streams(stack=stack, name=name, max_tokens=NUM_TOKENS, rate_tps=NUM_TOKENS / life_s)
    lives, task = asyncio.create_task(lasting.run()), asyncio.create_task(streams.run())
    await lasting.wait_live()
    for service in BACKGROUND:
        async with fault(stack, service):
            await asyncio.sleep(least_s)
            await lasting.go_on()
    assert not lives.done()
    lives.cancel()
    pairs = await task
    for service in ("planner", "tracker"):
        await asyncio.to_thread(stack.wait_serving, service)

    for pair, reference in zip(pairs, undisturbed, strict=True):
        assert_complete(pair, reference, NUM_TOKENS)
    for id_, reference in zip(lasting.grpc_ids, undisturbed, strict=False):
        got = lasting.received[id_]
        assert got.token_indices == list(range(len(got.token_ids)))
        assert got.token_ids[:NUM_TOKENS] == reference.token_ids[: len(got.token_ids)]

    def settled() -> bool:
        records = recorded(stack)
        return all(
            id_ in records
            and records[id_].state == tracker_pb.REQUEST_STATE_FINISHED
            and records[id_].num_generated_tokens == NUM_TOKENS
            and records[id_].num_delivered_tokens == NUM_TOKENS
            for id_ in streams.ids
        )

    await asyncio.to_thread(wait_until, settled, "the tracker's counts equal the clients'")


async def live_streams(stack: Stack, name: str) -> tuple[Streams, Running]:
    """Begin long streams; return them once each reader has tokens, and how each will end."""
    streams = Streams(stack=stack, name=name, max_tokens=MANY_TOKENS, rate_tps=SLOW_TPS)
    running = asyncio.create_task(streams.endings())
    await streams.wait_live()
    return streams, running


async def assert_served_again(stack: Stack, name: str) -> None:
    await asyncio.to_thread(stack.wait_ready)
    await asyncio.to_thread(wait_until, lambda: num_in_engine(stack) == 0, "the engine is empty")
    again = await http_chat(stack.base_url, "Hello?", max_tokens=4, request_id=f"{name}-again")
    assert (again.status, again.num_output_tokens) == (200, 4)


async def assert_refused(stack: Stack, name: str) -> None:
    refused = await http_chat(stack.base_url, "Hello?", max_tokens=4, request_id=f"{name}-refused")
    assert refused.status == 503
    assert not stack.is_ready()


async def assert_goes_on(streams: Streams, running: Running, undisturbed: list[Received]) -> None:
    """Every reader gets more, and has what it would have without a fault; then all leave."""
    await streams.go_on()
    assert not running.done()
    running.cancel()
    for id_, reference in zip(streams.grpc_ids, undisturbed, strict=True):
        got = streams.received[id_]
        assert got.token_indices == list(range(len(got.token_ids)))
        assert got.token_ids[:NUM_TOKENS] == reference.token_ids[: len(got.token_ids)]
    for id_, reference in zip(streams.http_ids, undisturbed, strict=True):
        text = streams.received[id_].text
        assert text.startswith(reference.text) or reference.text.startswith(text)


async def test_streams_go_on_when_their_executor_is_started_again(
    stack: Stack, undisturbed: list[Received]
) -> None:
    streams, running = await live_streams(stack, "killed")
    engine = stack.engine_processes()
    assert len(engine) == 2  # EngineCore and one worker
    await asyncio.to_thread(stack.kill, "executor")

    await asyncio.to_thread(assert_gone, engine)
    await assert_refused(stack, "killed")
    await asyncio.to_thread(stack.start, "executor")
    await assert_goes_on(streams, running, undisturbed)
    await assert_served_again(stack, "killed")


@pytest.mark.nightly
async def test_streams_of_a_hanging_executor_go_on_with_it(
    alert_stack: Stack, undisturbed: list[Received]
) -> None:
    stack = alert_stack
    streams, running = await live_streams(stack, "stuck")
    with stack.frozen("executor"):
        async with asyncio.timeout(GIVEN_UP_S):
            await asyncio.to_thread(wait_until, lambda: not stack.is_ready(), "it is given up")
        await assert_refused(stack, "stuck")
        await asyncio.sleep(HANG_S)
    await assert_goes_on(streams, running, undisturbed)
    await assert_served_again(stack, "stuck")


async def test_the_requests_of_a_killed_gateway_are_aborted(stack: Stack) -> None:
    streams, running = await live_streams(stack, "orphan")
    await asyncio.to_thread(stack.kill, "gateway")
    over_http, over_grpc = await running

    assert all(isinstance(failed, httpx.TransportError) for failed in over_http)
    assert all(isinstance(failed, aio.AioRpcError) for failed in over_grpc)
    await asyncio.to_thread(wait_until, lambda: num_in_engine(stack) == 0, "the engine is empty")
    await streams.wait_recorded(tracker_pb.REQUEST_STATE_CANCELLED)
    await asyncio.to_thread(stack.start, "gateway")
    await assert_served_again(stack, "orphan")


@pytest.mark.nightly
async def test_the_requests_of_a_hanging_gateway_are_aborted_and_go_on_with_it(
    alert_stack: Stack, undisturbed: list[Received]
) -> None:
    stack = alert_stack
    streams, running = await live_streams(stack, "deaf")
    with stack.frozen("gateway"):
        gone = "the engine is empty, though the gateway holds its connections"
        await asyncio.to_thread(wait_until, lambda: num_in_engine(stack) == 0, gone)
        await streams.wait_recorded(tracker_pb.REQUEST_STATE_CANCELLED)
        await asyncio.sleep(HANG_S)

    await assert_goes_on(streams, running, undisturbed)
    await assert_served_again(stack, "deaf")
