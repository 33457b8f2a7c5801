"""Sends inputs, and says what became of each."""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import httptools
from grpc import aio

from bench.fuzz.types import Input, Kind

ANSWER_TIMEOUT_S = 60.0  # until an answer begins, or the connection ends
READ_TIMEOUT_S = 20.0  # for an answer that has begun; then its client leaves
READER_BUFFER_BYTES = 16 << 10
# 5xx: with cause only.
STATUSES = frozenset({200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 429, 431})
CODES = frozenset({"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "CANCELLED"})
_SERVICE = "/evenflow.gateway.v1.GatewayService/"


class UnexpectedError(Exception):
    """The gateway did what it should not."""


@dataclass(slots=True)
class _Heard:
    """What came over a connection."""

    statuses: list[int] = field(default_factory=list)
    num_complete: int = 0


class Connection(asyncio.Protocol):
    """One HTTP connection, from the client's side."""

    def __init__(self) -> None:
        self.heard = _Heard()
        self.is_closed = False
        self._changed = asyncio.Event()
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.transport.abort()
            raise UnexpectedError(f"an answer that is no HTTP: {data[:80]!r}") from error

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        self._changed.set()

    def on_headers_complete(self) -> None:
        self.heard.statuses.append(self._parser.get_status_code())
        self._changed.set()

    def on_message_complete(self) -> None:
        self.heard.num_complete += 1
        self._changed.set()

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until it holds, or the connection is closed; False if neither came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (self.is_closed or condition()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True


class Sender:
    """Sends one input after the other, HTTP requests on one connection while that lasts."""

    def __init__(self, http_port: int, channel: aio.Channel) -> None:
        self._port = http_port
        self._channel = channel
        self._kept: Connection | None = None

    async def send(self, input: Input) -> str:
        """Return the input's outcome. Raises UnexpectedError."""
        match input.kind:
            case Kind.REQUEST:
                return await self._request(input)
            case Kind.BYTES:
                return await self._bytes(input)
            case Kind.READER:
                return await self._read(input)
        return await self._call(input)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", self._port)
        return connection

    async def _request(self, input: Input) -> str:
        connection, self._kept = self._kept, None
        if connection is None or connection.is_closed:
            connection = await self._connect()
        connection.heard = heard = _Heard()
        connection.transport.write(input.content)
        if not await connection.until(lambda: bool(heard.statuses), ANSWER_TIMEOUT_S):
            raise UnexpectedError("no answer")
        is_read = await connection.until(lambda: heard.num_complete > 0, READ_TIMEOUT_S)
        if not heard.statuses:
            return "closed"  # it had been idle for too long when the request came
        if is_read and not connection.is_closed:
            self._kept = connection
        else:
            connection.transport.abort()
        return _checked(heard)

    async def _bytes(self, input: Input) -> str:
        connection = await self._connect()
        for piece in _pieces(input):
            if connection.is_closed:
                break
            connection.transport.write(piece)
            await asyncio.sleep(0)
        heard = connection.heard
        if not await connection.until(lambda: bool(heard.statuses), ANSWER_TIMEOUT_S):
            raise UnexpectedError("neither an answer nor an end")
        await connection.until(lambda: heard.num_complete > 0, READ_TIMEOUT_S)
        connection.transport.abort()
        return _checked(heard) if heard.statuses else "closed"

    async def _read(self, input: Input) -> str:
        """Read a stream through a small window, with pauses; leave in the middle."""
        loop, opened = asyncio.get_running_loop(), socket.socket()
        opened.setblocking(False)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READER_BUFFER_BYTES)
        with opened:
            await loop.sock_connect(opened, ("127.0.0.1", self._port))
            await loop.sock_sendall(opened, input.content)
            begun = b""
            for pause_s in input.pauses_s:
                await asyncio.sleep(pause_s)
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    data = await loop.sock_recv(opened, 4096)
                begun = begun or data
                if not data:
                    break
        if not begun:
            return "left"
        return _checked(_Heard([int(begun[9:12])]))

    async def _call(self, input: Input) -> str:
        name = "Generate" if input.kind is Kind.GENERATE else "Chat"
        call = self._channel.unary_stream(_SERVICE + name)(input.content)
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                async for _ in call:
                    pass
            code = "OK"
        except TimeoutError:
            call.cancel()
            return "left"
        except aio.AioRpcError as error:
            code = error.code().name
            if code not in CODES:
                raise UnexpectedError(f"{code}: {error.details()}") from None
        return code


def _pieces(input: Input) -> list[bytes]:
    places = [0, *input.cuts, len(input.content)]
    return [input.content[a:b] for a, b in pairwise(places) if b > a]


def _checked(heard: _Heard) -> str:
    for status in heard.statuses:
        if status not in STATUSES:
            raise UnexpectedError(f"status {status}")
    return str(heard.statuses[0])
