"""Clients go away at any moment, whatever they asked for: nothing of their requests is left."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import httpx
import pytest
from grpc import aio

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.executor.v1 import executor_pb2_grpc as pb_grpc
from evenflow.tracker.v1 import tracker_pb2 as tracker_pb
from lab.stack.metrics import sums_by_name
from lab.stack.processes import RPC_TIMEOUT_S, Stack, wait_until
from tests.clients import recorded
from tests.drawn_requests import Drawn, Moment, abandon, draw
from tests.live_streams import num_in_engine

pytestmark = pytest.mark.timeout(3_600)

NUM_REQUESTS = 50
GONE_S = 1_200.0  # a guard against hangs
FINAL = {
    tracker_pb.REQUEST_STATE_FINISHED,
    tracker_pb.REQUEST_STATE_FAILED,
    tracker_pb.REQUEST_STATE_CANCELLED,
}


class Watcher:
    """What the engine does, update by update."""

    def __init__(self) -> None:
        self._update = pb.WatchRequestsResponse()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def watching(self, stack: Stack) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch(stack))
        yield
        task.cancel()
        await asyncio.wait([task])

    async def _watch(self, stack: Stack) -> None:
        async with aio.insecure_channel(stack.address("executor")) as channel:
            stub = pb_grpc.ExecutorServiceStub(channel)
            async for update in stub.WatchRequests(pb.WatchRequestsRequest(max_updates_per_s=20)):
                async with self._changed:
                    self._update = update
                    self._changed.notify_all()

    async def reached(self, drawn: Drawn) -> None:
        """Wait for the moment at which a request is to be abandoned."""
        match drawn.moment:
            case Moment.SENT:
                return
            case Moment.ENTERED:
                await self._wait(lambda: bool(self._seen(drawn)))
            case Moment.GENERATING:
                await self._wait(lambda: any(r.num_generated_tokens > 2 for r in self._seen(drawn)))
            case Moment.DEADLINE:
                await asyncio.Event().wait()  # the call ends by itself

    def _seen(self, drawn: Drawn) -> list[pb.ObservedRequest]:
        names = (f"{drawn.name}:", f"{drawn.name}.")  # of an only answer, of several
        return [r for r in self._update.requests if r.request_id.startswith(names)]

    async def _wait(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)


def metrics_of(stack: Stack, name: str) -> dict[str, float]:
    """Return a process' figures, summed over labels."""
    text = httpx.get(f"http://{stack.address(name)}/metrics", timeout=RPC_TIMEOUT_S).text
    return sums_by_name(text)


def num_live(stack: Stack) -> dict[str, float]:
    """Return how many requests each part of the stack has."""
    executor = metrics_of(stack, "executor_metrics")
    return {
        "gateway": metrics_of(stack, "gateway_metrics")["evenflow_gateway_live_requests"],
        "sessions": executor["evenflow_executor_live_requests"],
        "engine": num_in_engine(stack),
        "running": executor["vllm:num_requests_running"],
        "waiting": executor["vllm:num_requests_waiting"],
        "groups": executor["vllm:evenflow_kv_num_resident_groups"],
        "tracker": sum(record.state not in FINAL for record in recorded(stack).values()),
    }


def pool_blocks(stack: Stack) -> tuple[int, int]:
    """Return the blocks of the pool and the free ones, as a watcher of the engine sees them."""
    with grpc.insecure_channel(stack.address("executor")) as channel:
        watch = pb_grpc.ExecutorServiceStub(channel).WatchRequests(
            pb.WatchRequestsRequest(max_updates_per_s=1), timeout=RPC_TIMEOUT_S
        )
        update = next(iter(watch))
        watch.cancel()
    return update.num_pool_blocks, update.num_free_pool_blocks


def complaints(text: str) -> list[str]:
    """Return a log's tracebacks and errors."""
    lines = text.splitlines()
    return [line for line in lines if "Traceback" in line or _level(line) == "error"]


def _level(line: str) -> str:
    try:
        return str(json.loads(line).get("level", ""))
    except (ValueError, AttributeError):
        return ""


@pytest.mark.parametrize("seed", [2, pytest.param(4, marks=pytest.mark.nightly)])
async def test_abandoned_requests_leave_nothing_anywhere(stack: Stack, seed: int) -> None:
    services = ("gateway", "executor", "tracker")
    begun = {name: len(stack.log(name)) for name in services}
    orphans = metrics_of(stack, "executor_metrics").get(
        "evenflow_executor_orphaned_requests_total", 0.0
    )
    rng, watcher = random.Random(seed), Watcher()
    drawn = [draw(rng, f"drawn-{seed}-{number}") for number in range(NUM_REQUESTS)]

    async with watcher.watching(stack), asyncio.timeout(GONE_S):
        await asyncio.gather(*(abandon(stack, one, watcher.reached) for one in drawn))

    await asyncio.to_thread(
        wait_until, lambda: not any(num_live(stack).values()), "nothing is left", GONE_S
    )
    executor = metrics_of(stack, "executor_metrics")
    num_blocks, num_free = pool_blocks(stack)
    assert executor["vllm:evenflow_kv_num_free_blocks"] == num_free == num_blocks
    assert executor.get("evenflow_executor_orphaned_requests_total", 0.0) == orphans
    assert stack.is_ready()
    for name, at in begun.items():
        assert complaints(stack.log(name)[at:]) == []
