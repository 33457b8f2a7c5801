"""A gateway in a thread of its own, for tests that are not asynchronous themselves."""

import asyncio
from collections.abc import Awaitable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any

from tests.fake_executor import FakeExecutor, Script
from tests.gateways import Client, gateway_for

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Edge:
    """A gateway in a thread of its own, for tests that hypothesis calls again and again."""

    loop: asyncio.AbstractEventLoop
    client: Client
    executor: FakeExecutor

    def run(self, work: Awaitable[Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(TIMEOUT_S):
                return await work

        return asyncio.run_coroutine_threadsafe(bounded(), self.loop).result()


@contextmanager
def running_edge() -> Iterator[Edge]:
    started: Future[Edge] = Future()

    async def serve() -> None:
        executor = FakeExecutor()
        executor.script_for = lambda _: Script(texts=["é"])  # a second one may be due in years
        await executor.start()
        async with gateway_for(executor) as client:
            await client.wait_ready()
            leave = asyncio.Event()
            started.set_result(Edge(asyncio.get_running_loop(), client, executor))
            leaving.set_result(leave)
            await leave.wait()
        await executor.kill()

    leaving: Future[asyncio.Event] = Future()
    thread = Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    edge = started.result(TIMEOUT_S)
    try:
        yield edge
    finally:
        edge.loop.call_soon_threadsafe(leaving.result().set)
        thread.join(TIMEOUT_S)
