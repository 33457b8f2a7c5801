"""A server's life: health follows it, reflection lists its services, drain lets live calls end."""

import asyncio
from contextlib import AsyncExitStack

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.kit import server as server_module
from services.kit.server import ServiceServer, run_until_stopped

NAME = "evenflow.planner.v1.PlannerService"
LONG_S = 3_600.0


async def health(channel: aio.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_health_is_not_serving_before_serving_and_while_draining(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "LAST_ANSWERS_S", LONG_S)
    server = ServiceServer("127.0.0.1:0", [NAME])
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        assert await health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.mark_serving()
        assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
        assert await health(channel, NAME) == health_pb2.HealthCheckResponse.SERVING

        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        drain = asyncio.create_task(server.drain(LONG_S))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        await drain


async def test_calls_beyond_the_most_at_a_time_are_refused() -> None:
    server = ServiceServer("127.0.0.1:0", [NAME], max_calls=2)
    await server.start()
    await server.mark_serving()
    async with AsyncExitStack() as channels:
        own = [("grpc.use_local_subchannel_pool", 1)]  # a connection each
        first, second, third = [
            await channels.enter_async_context(
                aio.insecure_channel(f"127.0.0.1:{server.port}", options=own)
            )
            for _ in range(3)
        ]
        watches = [
            health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            for channel in (first, second)
        ]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(aio.AioRpcError) as caught:
            await health(third)
    await server.drain(0)

    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_reflection_lists_the_service() -> None:
    server = ServiceServer("127.0.0.1:0", [NAME])
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        listed = {s.name for s in (await call.read()).list_services_response.service}
    await server.drain(0)

    assert {NAME, "grpc.health.v1.Health"} <= listed


@pytest.mark.parametrize("drain_timeout_s", [LONG_S, 0.0])
@pytest.mark.logs("drain_started", "drain_finished")
async def test_drain_lets_live_calls_end_within_the_timeout(
    drain_timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "LAST_ANSWERS_S", LONG_S)
    entered, release = asyncio.Event(), asyncio.Event()

    async def hold(request, context) -> bytes:
        entered.set()
        await release.wait()
        return b"done"

    server = ServiceServer("127.0.0.1:0", [])
    handlers = {"hold": grpc.unary_unary_rpc_method_handler(hold)}
    server.grpc.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Hold", handlers),)
    )
    await server.start()
    stop = asyncio.Event()
    served = asyncio.create_task(
        run_until_stopped(server, stop=stop, drain_timeout_s=drain_timeout_s)
    )
    async with aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.unary_unary("/test.Hold/hold")(b"x")
        await entered.wait()
        stop.set()
        if drain_timeout_s:
            release.set()
            assert await call == b"done"
        else:
            with pytest.raises((aio.AioRpcError, asyncio.CancelledError)):
                await call
        await served


async def test_a_health_watch_does_not_hold_up_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LAST_ANSWERS_S", 0.05)
    server = ServiceServer("127.0.0.1:0", [NAME])
    await server.start()
    await server.mark_serving()
    async with aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING

        async with asyncio.timeout(600):  # far below the drain's own limit
            await server.drain(timeout_s=36_000)
