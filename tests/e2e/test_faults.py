"""Processes die, hang and come back: tokens are neither lost nor doubled, counts agree afterwards.

A hang is SIGSTOP: connections stay open, nobody answers. EVENFLOW_TEST_HANG_S=30 makes each as long
as that, with the keepalive of production (`make test-faults`).
"""

import asyncio
import signal
import time
from collections.abc import Callable

import grpc
import httpx
import pytest
from grpc import aio

from evenflow.tracker.v1 import tracker_pb2 as tracker_pb
from tests.clients import Received, http_chat, recorded
from tests.live_streams import Ending, Endings, Streams, assert_complete, num_in_engine
from tests.processes import HANG_S, KEEPALIVE_S, Stack, wait_until

pytestmark = pytest.mark.timeout(600)

BACKGROUND = ("planner", "tracker", "redis")  # off the tokens' path
NUM_TOKENS = 600
MANY_TOKENS = 1_900  # more than are generated before the fault: some 30 s
SLOW_TPS = 10.0
DEAD_S = 1.0
GIVEN_UP_S = 5 * KEEPALIVE_S  # two, and slack


def die(stack: Stack, name: str) -> None:
    """Kill a process, leave it dead for a while, start it again."""
    stack.redis.kill() if name == "redis" else stack.kill(name)
    time.sleep(DEAD_S)
    stack.redis.start() if name == "redis" else stack.launch(name)


def hang(stack: Stack, name: str) -> None:
    with stack.frozen(name):
        time.sleep(HANG_S)


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list[Received]:
    """What each pair of streams gets when nothing happens."""
    calm = Streams(stack=stack, name="calm", max_tokens=NUM_TOKENS)
    return [rpc for _, rpc in asyncio.run(calm.run())]


@pytest.mark.parametrize(
    ("fault", "life_s"),
    [
        pytest.param(die, 15.0, id="die"),
        pytest.param(hang, 3 * HANG_S + 9.0, id="hang"),
    ],
)
async def test_planner_tracker_and_redis_may(
    stack: Stack, undisturbed: list[Received], fault: Callable[[Stack, str], None], life_s: float
) -> None:
    streams = Streams(
        stack=stack,
        name=fault.__name__,
        max_tokens=NUM_TOKENS,
        rate_tps=NUM_TOKENS / life_s,
    )
    task = asyncio.create_task(streams.run())
    await streams.wait_live()
    during = []
    for name in BACKGROUND:
        start_s = time.monotonic()
        await asyncio.to_thread(fault, stack, name)
        during.append((name, start_s, time.monotonic()))
    assert not task.done()  # the faults fell into the streams' life
    pairs = await task
    for name in ("planner", "tracker"):
        await asyncio.to_thread(stack.wait_serving, name)

    for pair, reference in zip(pairs, undisturbed, strict=True):
        assert_complete(pair, reference, NUM_TOKENS)
        for name, start_s, end_s in during:
            for got in pair:  # nobody waited for the end of the fault
                assert any(start_s < at_s < end_s for at_s in got.arrived_s), name

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
    await asyncio.to_thread(stack.kill, "executor")

    assert_each_ended_once(*await running)
    await assert_refused(stack, "killed")
    await asyncio.to_thread(stack.start, "executor")
    await assert_served_again(stack, "killed")


async def test_a_hanging_executor_is_given_up_and_taken_back(stack: Stack) -> None:
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


async def test_the_requests_of_a_hanging_gateway_are_aborted(stack: Stack) -> None:
    streams, running = await live_streams(stack, "deaf")
    with stack.frozen("gateway"):
        gone = "the engine is empty, though the gateway holds its connections"
        await asyncio.to_thread(wait_until, lambda: num_in_engine(stack) == 0, gone)
        await streams.wait_recorded(tracker_pb.REQUEST_STATE_CANCELLED)
        await asyncio.sleep(HANG_S)

    assert_each_ended_once(*await running)
    await assert_served_again(stack, "deaf")


@pytest.mark.parametrize(
    ("service", "num_tokens", "rate_tps"),
    [
        pytest.param("gateway", 40, 10.0, id="gateway"),  # paced: 4 s to deliver
        pytest.param("executor", 300, None, id="executor"),  # some 3 s to generate
    ],
)
async def test_sigterm_lets_a_live_stream_end(
    stack: Stack, service: str, num_tokens: int, rate_tps: float | None
) -> None:
    options = {"max_tokens": num_tokens, "rate_tps": rate_tps}
    task = asyncio.create_task(
        http_chat(stack.base_url, "Slowly.", request_id=f"drain-{service}", **options)
    )

    def streaming() -> bool:
        records = recorded(stack)
        return (
            f"drain-{service}" in records and records[f"drain-{service}"].num_delivered_tokens > 2
        )

    await asyncio.to_thread(wait_until, streaming, "the stream is live")
    code = await asyncio.to_thread(stack.kill, service, signal.SIGTERM)
    got = await task

    assert code == 0, stack.log_tail(service)
    assert (got.errors, got.done, got.num_output_tokens) == ([], True, num_tokens)
    await asyncio.to_thread(stack.start, service)
    await asyncio.to_thread(stack.wait_ready)
