"""Processes die, hang and come back: tokens are neither lost nor doubled, counts agree afterwards.

A hang is SIGSTOP: connections stay open, nobody answers. EVENFLOW_TEST_HANG_S=30 makes each as long
as that, with the keepalive of production (`make test-faults`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import grpc
import httpx
import pytest
from grpc import aio

from evenflow.tracker.v1 import tracker_pb2 as tracker_pb
from lab.models import MAX_MODEL_LEN
from lab.stack.processes import HANG_S, Stack, assert_gone, wait_until
from tests.clients import Received, http_chat, recorded
from tests.live_streams import Ending, Endings, Streams, assert_complete, num_in_engine

pytestmark = pytest.mark.timeout(3_600)

BACKGROUND = ("planner", "tracker", "redis")  # off the tokens' path
NUM_TOKENS = 300
MANY_TOKENS = MAX_MODEL_LEN - 512  # minutes: more than are generated before any fault
SLOW_TPS = 10.0
DEAD_S = 1.0
ALERT_KEEPALIVE_S = 10.0 if HANG_S >= 30 else 5.0
GIVEN_UP_S = 5 * ALERT_KEEPALIVE_S  # two, and slack

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


async def live_streams(stack: Stack, name: str) -> tuple[Streams, "asyncio.Task[Endings]"]:
    """Begin long streams; return them once each reader has tokens, and how each will end."""
    streams = Streams(stack=stack, name=name, max_tokens=MANY_TOKENS, rate_tps=SLOW_TPS)
    running = asyncio.create_task(streams.endings())
    await streams.wait_live()
    return streams, running


def assert_each_ended_once(over_http: list[Ending], over_grpc: list[Ending]) -> None:
    """Every reader has some tokens, then one error."""
    for got in over_http:
        assert isinstance(got, Received)
        assert (got.status, got.done, len(got.errors)) == (200, False, 1)
        assert got.text
    for failed in over_grpc:
        assert isinstance(failed, aio.AioRpcError)
        assert failed.code() == grpc.StatusCode.UNAVAILABLE


async def assert_served_again(stack: Stack, name: str) -> None:
    await asyncio.to_thread(stack.wait_ready)
    await asyncio.to_thread(wait_until, lambda: num_in_engine(stack) == 0, "the engine is empty")
    again = await http_chat(stack.base_url, "Hello?", max_tokens=4, request_id=f"{name}-again")
    assert (again.status, again.num_output_tokens) == (200, 4)


async def assert_refused(stack: Stack, name: str) -> None:
    refused = await http_chat(stack.base_url, "Hello?", max_tokens=4, request_id=f"{name}-refused")
    assert refused.status == 503
    assert not stack.is_ready()


async def test_a_dying_executor_ends_each_stream_once_and_service_returns(stack: Stack) -> None:
    _, running = await live_streams(stack, "killed")
    engine = stack.engine_processes()
    assert len(engine) == 2  # EngineCore and one worker
    await asyncio.to_thread(stack.kill, "executor")

    assert_each_ended_once(*await running)
    await asyncio.to_thread(assert_gone, engine)
    await assert_refused(stack, "killed")
    await asyncio.to_thread(stack.start, "executor")
    await assert_served_again(stack, "killed")


@pytest.mark.nightly
async def test_a_hanging_executor_is_given_up_and_taken_back(alert_stack: Stack) -> None:
    stack = alert_stack
    _, running = await live_streams(stack, "stuck")
    with stack.frozen("executor"):
        async with asyncio.timeout(GIVEN_UP_S):
            assert_each_ended_once(*await running)
        await assert_refused(stack, "stuck")
        await asyncio.sleep(HANG_S)
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
async def test_the_requests_of_a_hanging_gateway_are_aborted(alert_stack: Stack) -> None:
    stack = alert_stack
    streams, running = await live_streams(stack, "deaf")
    with stack.frozen("gateway"):
        gone = "the engine is empty, though the gateway holds its connections"
        await asyncio.to_thread(wait_until, lambda: num_in_engine(stack) == 0, gone)
        await streams.wait_recorded(tracker_pb.REQUEST_STATE_CANCELLED)
        await asyncio.sleep(HANG_S)

    assert_each_ended_once(*await running)
    await assert_served_again(stack, "deaf")
