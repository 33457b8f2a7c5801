"""A peer that stands still is given up, also with other pings under way."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

import grpc
import pytest

from services.kit.rpc import make_channel
from services.kit.transport import Transport
from tests.tick_server import METHOD

KEEPALIVE_S = 10.0
SLACK_S = 55.0  # gRPC's own timeout of a ping is a minute


@pytest.fixture
async def server() -> AsyncIterator[Process]:
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.tick_server", str(KEEPALIVE_S), stdout=PIPE
    )
    yield server
    server.kill()
    await server.wait()


@pytest.mark.nightly
async def test_a_stream_from_a_stopped_process_ends(server: Process) -> None:
    assert server.stdout is not None
    address = f"127.0.0.1:{int(await server.stdout.readline())}"
    transport = Transport(keepalive_s=KEEPALIVE_S)
    async with asyncio.timeout(SLACK_S), make_channel(address, transport=transport) as channel:
        call = channel.unary_stream(METHOD)(b"")
        for _ in range(150):
            await call.read()
        server.send_signal(signal.SIGSTOP)
        assert await call.code() == grpc.StatusCode.UNAVAILABLE
