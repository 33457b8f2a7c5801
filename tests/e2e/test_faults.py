"""Processes die and come back: tokens are neither lost nor doubled, counts agree afterwards."""

import asyncio
import signal

import grpc
import pytest
from grpc import aio

from evenflow.tracker.v1 import tracker_pb2 as tracker_pb
from tests.clients import Received, grpc_chat, http_chat, recorded
from tests.processes import Stack, wait_until

pytestmark = pytest.mark.timeout(400)

NUM_PAIRS = 11  # of an HTTP and a gRPC stream with the same prompt: 22 live streams


async def stream_pairs(
    stack: Stack, name: str, *, max_tokens: int, rate_tps: float | None
) -> list[tuple[Received, Received]]:
    """Run all pairs at once; each pair has its own prompt."""

    async def pair(i: int) -> tuple[Received, Received]:
        prompt = f"Stream {i}: " + "tell me more. " * (i + 1)
        options = {"max_tokens": max_tokens, "rate_tps": rate_tps}
        return await asyncio.gather(
            http_chat(stack.base_url, prompt, request_id=f"{name}-http-{i}", **options),
            grpc_chat(stack.address("gateway"), prompt, request_id=f"{name}-grpc-{i}", **options),
        )

    return await asyncio.gather(*(pair(i) for i in range(NUM_PAIRS)))


def assert_complete(pair: tuple[Received, Received], reference: Received, num_tokens: int) -> None:
    """Both streams hold each token of the reference once and in order."""
    http, rpc = pair
    assert rpc.token_indices == list(range(num_tokens))
    assert rpc.token_ids == reference.token_ids
    assert (http.status, http.errors, http.done) == (200, [], True)
    assert (http.text, rpc.text) == (reference.text, reference.text)
    assert (http.num_output_tokens, rpc.num_output_tokens) == (num_tokens, num_tokens)


async def test_planner_tracker_and_redis_may_die_under_live_streams(stack: Stack) -> None:
    num_tokens = 600
    undisturbed = await stream_pairs(stack, "calm", max_tokens=num_tokens, rate_tps=None)
    task = asyncio.create_task(
        stream_pairs(stack, "faults", max_tokens=num_tokens, rate_tps=40.0)  # 15 s
    )
    live = {f"faults-{edge}-{i}" for edge in ("http", "grpc") for i in range(NUM_PAIRS)}

    def tracked() -> bool:
        records = recorded(stack)
        return all(id_ in records and records[id_].num_generated_tokens > 0 for id_ in live)

    await asyncio.to_thread(wait_until, tracked, "all streams live")
    await asyncio.to_thread(stack.redis.kill)
    await asyncio.to_thread(stack.redis.start)
    for name in ("tracker", "planner"):
        await asyncio.to_thread(stack.kill, name)
        await asyncio.to_thread(stack.start, name)
    assert not task.done()  # the faults fell into the streams' life
    pairs = await task

    for pair, (_, reference) in zip(pairs, undisturbed, strict=True):
        assert_complete(pair, reference, num_tokens)

    def settled() -> bool:
        records = recorded(stack)
        return all(
            id_ in records
            and records[id_].state == tracker_pb.REQUEST_STATE_FINISHED
            and records[id_].num_generated_tokens == num_tokens
            and records[id_].num_delivered_tokens == num_tokens
            for id_ in live
        )

    await asyncio.to_thread(wait_until, settled, "the tracker's counts equal the clients'")


async def test_a_dying_executor_ends_each_stream_once_and_service_returns(stack: Stack) -> None:
    options = {"max_tokens": 1_900, "rate_tps": 10.0}  # some 30 s of generation
    rpc = stack.address("gateway")
    running = asyncio.gather(
        *(
            http_chat(stack.base_url, "Go on.", request_id=f"kill-{i}", **options)
            for i in range(10)
        ),
        *(grpc_chat(rpc, "Go on.", request_id=f"kill-grpc-{i}", **options) for i in range(10)),
        return_exceptions=True,
    )

    def streaming() -> bool:
        records = recorded(stack)
        ids = [f"kill-{kind}{i}" for kind in ("", "grpc-") for i in range(10)]
        return all(id_ in records and records[id_].num_delivered_tokens > 2 for id_ in ids)

    await asyncio.to_thread(wait_until, streaming, "all streams live")
    await asyncio.to_thread(stack.kill, "executor")
    results = await running

    for http in results[:10]:
        assert isinstance(http, Received)
        assert (http.status, http.done, len(http.errors)) == (200, False, 1)
        assert http.text
    for failed in results[10:]:
        assert isinstance(failed, aio.AioRpcError)
        assert failed.code() == grpc.StatusCode.UNAVAILABLE

    refused = await http_chat(stack.base_url, "Hello?", max_tokens=4, request_id="refused")
    assert refused.status == 503
    assert not stack.is_ready()

    await asyncio.to_thread(stack.start, "executor")
    await asyncio.to_thread(stack.wait_ready)
    again = await http_chat(stack.base_url, "Hello?", max_tokens=4, request_id="again")
    assert (again.status, again.num_output_tokens) == (200, 4)


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
