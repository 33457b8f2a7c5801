"""Gateways in the test's own event loop, on free ports, with real sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import httpx
from grpc import aio

from services.gateway.app import Gateway, run_gateway
from services.gateway.settings import GatewaySettings
from tests.fake_executor import EVENT_TIMEOUT_S, MODEL, FakeExecutor

JSON = {"content-type": "application/json"}  # of a body that httpx does not write


@dataclass(frozen=True, kw_only=True)
class Client:
    """A gateway and ways to reach it."""

    gateway: Gateway
    http: httpx.AsyncClient
    channel: aio.Channel

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.http_port}"

    def num_generated(self) -> list[int]:
        """Return how many tokens the gateway has of each live request."""
        return [live.generation._num_generated for live in self.gateway.dispatcher._live.values()]

    async def wait_ready(self) -> None:
        await until(lambda: self.gateway.dispatcher.is_ready)

    async def wait_idle(self) -> None:
        async with asyncio.timeout(EVENT_TIMEOUT_S):
            await self.gateway.dispatcher.wait_idle()


async def until(condition: Callable[[], bool]) -> None:
    """Poll `condition`, which nothing announces, until it holds."""
    async with asyncio.timeout(EVENT_TIMEOUT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Addressed(Protocol):
    """An executor, real or not."""

    @property
    def address(self) -> str: ...


def make_settings(*executors: Addressed, **overrides: object) -> GatewaySettings:
    values: dict[str, object] = {
        "http_port": 0,
        "grpc_port": 0,
        "executors": ",".join(executor.address for executor in executors),
        "tracker": "",
        "id": "gateway-under-test",
        "drain_timeout_s": 0.0,
        # A test that stands still for a while breaks no link, has no request refused, and gets no
        # comments in its streams.
        "grpc_keepalive_s": EVENT_TIMEOUT_S,
        "submit_timeout_s": EVENT_TIMEOUT_S,
        "sse_keepalive_s": 0.0,
    }
    return GatewaySettings.model_validate(values | overrides)


@asynccontextmanager
async def connect(gateway: Gateway) -> AsyncIterator[Client]:
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{gateway.http_port}",
            timeout=EVENT_TIMEOUT_S,
            limits=limits,
        ) as http,
        aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
    ):
        yield Client(gateway=gateway, http=http, channel=channel)


@asynccontextmanager
async def gateway_for(*executors: Addressed, **overrides: object) -> AsyncIterator[Client]:
    """Run a gateway over `executors`. It need not be connected when the block begins."""
    async with run_gateway(make_settings(*executors, **overrides)) as gateway:
        async with connect(gateway) as client:
            yield client
        gateway.pacer.check_integrity()


@asynccontextmanager
async def started(*executors: FakeExecutor) -> AsyncIterator[None]:
    """Run executors, and kill them whatever becomes of the block."""
    async with AsyncExitStack() as stack:
        for executor in executors:
            await executor.start()
            stack.push_async_callback(executor.kill)
        yield


@asynccontextmanager
async def gateway_with(*executors: FakeExecutor, **overrides: object) -> AsyncIterator[Client]:
    """Run executors, and a gateway that is connected to all of them."""
    async with started(*executors), gateway_for(*executors, **overrides) as client:
        await until(lambda: all(executor.session for executor in executors))
        await client.wait_ready()
        yield client


def chat_body(**overrides: object) -> dict[str, object]:
    body: dict[str, object] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Say hello."}],
    }
    return body | overrides


def stream_body(**overrides: object) -> dict[str, object]:
    return chat_body(stream=True, **overrides)
