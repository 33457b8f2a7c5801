"""The gRPC edge: all four kinds of RPC map errors, carry request ids and pass deadlines on."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc import aio

from services.kit import errors, rpc
from services.kit.rpc import ServiceInterceptor, make_channel, service_errors

KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]


class Behavior:
    """A servicer whose four methods all do `act` and answer with what it returns.

    They read what the client writes to its end: one that is answered while it writes may be told of
    the write that failed.
    """

    def __init__(self) -> None:
        self.act = lambda: b"ok"

    async def unary(self, request, context) -> bytes:
        await read(request)
        return self.act()

    async def stream(self, request, context) -> AsyncIterator[bytes]:
        await read(request)
        yield b"first"
        yield self.act()


async def read(request: bytes | AsyncIterator[bytes]) -> None:
    if not isinstance(request, bytes):
        async for _ in request:
            pass


@pytest.fixture
def behavior() -> Behavior:
    return Behavior()


@pytest.fixture
async def channel(behavior) -> AsyncIterator[aio.Channel]:
    server = aio.server(interceptors=[ServiceInterceptor()])
    handlers = {
        "unary_unary": grpc.unary_unary_rpc_method_handler(behavior.unary),
        "unary_stream": grpc.unary_stream_rpc_method_handler(behavior.stream),
        "stream_unary": grpc.stream_unary_rpc_method_handler(behavior.unary),
        "stream_stream": grpc.stream_stream_rpc_method_handler(behavior.stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Kinds", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with make_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(grace=None)


async def call(channel: aio.Channel, kind: str, **kwargs) -> list[bytes]:
    """Return every response of one call."""
    multicallable = getattr(channel, kind)(f"/test.Kinds/{kind}")
    request = iter([b"x"]) if kind.startswith("stream") else b"x"
    running = multicallable(request, **kwargs)
    if kind.endswith("unary"):
        return [await running]
    return [response async for response in running]


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_pass_unchanged(channel, kind) -> None:
    assert (await call(channel, kind))[-1] == b"ok"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidRequestError("bad"), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.NotFoundError("bad"), grpc.StatusCode.NOT_FOUND),
        (errors.ConflictError("bad"), grpc.StatusCode.ABORTED),
        (errors.OverloadedError("bad"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.UnavailableError("bad"), grpc.StatusCode.UNAVAILABLE),
        (errors.DeadlineError("bad"), grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.name,
)
async def test_a_service_error_becomes_its_status_with_a_reason(
    channel, behavior, kind, error, status
) -> None:
    def fail() -> bytes:
        raise error

    behavior.act = fail
    with pytest.raises(aio.AioRpcError) as caught:
        await call(channel, kind)

    assert (caught.value.code(), caught.value.details()) == (status, "bad")
    assert caught.value.trailing_metadata()["error-reason"] == error.reason


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.logs("rpc_crashed")
async def test_an_unexpected_error_shows_nothing_of_itself(channel, behavior, kind) -> None:
    def fail() -> bytes:
        raise ZeroDivisionError("secret")

    behavior.act = fail
    with pytest.raises(aio.AioRpcError) as caught:
        await call(channel, kind)

    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in caught.value.details()


@pytest.mark.parametrize("kind", KINDS)
async def test_the_callers_request_id_is_bound_while_the_call_runs(channel, behavior, kind) -> None:
    behavior.act = lambda: rpc.current_request_id().encode()

    responses = await call(channel, kind, metadata=(("x-request-id", "req-7"),))

    assert responses[-1] == b"req-7"


@pytest.mark.parametrize("claimed", ["", "white space", "x" * 129])
async def test_an_unusable_request_id_is_replaced(channel, behavior, claimed) -> None:
    behavior.act = lambda: rpc.current_request_id().encode()

    (answer,) = await call(channel, "unary_unary", metadata=(("x-request-id", claimed),))

    assert answer.startswith(b"req-")
    assert answer != claimed.encode()


async def test_an_outgoing_call_carries_the_request_id_of_its_task(channel, behavior) -> None:
    behavior.act = lambda: rpc.current_request_id().encode()
    rpc.bind_request_id("req-outer")

    assert await call(channel, "unary_unary") == [b"req-outer"]


async def test_an_outgoing_timeout_is_cut_to_the_incoming_deadline(channel, behavior) -> None:
    seen: list[float] = []

    def remember() -> bytes:
        seen.extend([rpc.timeout_s(1_000.0), rpc.timeout_s(0.001)])
        return b"ok"

    behavior.act = remember
    await call(channel, "unary_unary", timeout=100.0)

    cut_s, cap_s = seen
    assert 0 < cut_s < 200.0  # deadlines travel in whole units: a little more may remain
    assert cap_s == 0.001


async def test_without_a_deadline_a_call_still_has_the_default_timeout(behavior) -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    async def hang(request, context) -> bytes:
        entered.set()
        await release.wait()
        return b"late"

    server = aio.server(interceptors=[ServiceInterceptor()])
    handlers = {"hang": grpc.unary_unary_rpc_method_handler(hang)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Slow", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    for default_timeout_s in (0.2, 2.0, 20.0, 200.0):  # until the call arrives in time
        async with make_channel(
            f"127.0.0.1:{port}", default_timeout_s=default_timeout_s
        ) as channel:
            await channel.channel_ready()
            with pytest.raises(aio.AioRpcError) as caught:
                await channel.unary_unary("/test.Slow/hang")(b"x")
        if entered.is_set():
            break
    release.set()
    await server.stop(grace=None)

    assert entered.is_set()
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_client_gets_the_service_error_back(channel, behavior) -> None:
    class LeaseLost(errors.NotFoundError):
        reason = "LEASE_LOST"

    def fail() -> bytes:
        raise LeaseLost("gone")

    behavior.act = fail
    with pytest.raises(errors.NotFoundError) as caught, service_errors():
        await call(channel, "unary_unary")

    assert (str(caught.value), caught.value.reason) == ("gone", "LEASE_LOST")


async def test_a_dead_peer_is_unavailable() -> None:
    async with make_channel("127.0.0.1:1") as channel:
        with pytest.raises(errors.UnavailableError), service_errors():
            await call(channel, "unary_unary")
