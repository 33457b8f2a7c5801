"""How long a connection may take for what it has begun, on a clock that the test moves."""

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from services.gateway.http.protocol import (
    MIN_BODY_BYTES_PER_S,
    BoundedHttpProtocol,
    ConnectionLimits,
    Connections,
)

LIMITS = ConnectionLimits(
    head_timeout_s=10.0,
    body_timeout_s=30.0,
    reader_timeout_s=60.0,
    max_connections=3,
    max_connections_per_address=2,
)
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
ANSWER = [
    {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]},
    {"type": "http.response.body", "body": b""},
]


class Loop:
    """A clock and its timers; tasks run in the test's own loop."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._tickets = count()
        self._timers: list[tuple[float, int, list[Callable[[], None]]]] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> "Timer":
        timer = Timer(callback)
        heapq.heappush(self._timers, (self.now_s + delay_s, next(self._tickets), timer.callbacks))
        return timer

    def create_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)

    def advance_to(self, until_s: float) -> None:
        while self._timers and self._timers[0][0] <= until_s:
            self.now_s, _, callbacks = heapq.heappop(self._timers)
            for callback in callbacks:
                callback()
        self.now_s = until_s


class Timer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callbacks = [callback]

    def cancel(self) -> None:
        self.callbacks.clear()


class Socket(asyncio.Transport):
    """Takes everything; `address` is the client's."""

    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self.num_unread = 0  # bytes that the client has not read
        self.is_cut = False
        self._is_closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def get_write_buffer_size(self) -> int:
        return self.num_unread

    def abort(self) -> None:
        self.is_cut = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    @property
    def status(self) -> int | None:
        """Return the status that was written last; None for nothing at all."""
        _, found, rest = self.written.rpartition(b"HTTP/1.1 ")
        return int(rest[:3]) if found else None


class Server:
    """Connections of one server, whose app answers when `answering` is set."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.answering = asyncio.Event()
        self._config = Config(
            self._answer, log_config=None, lifespan="off", interface="asgi3", timeout_keep_alive=75
        )
        self._state = ServerState()
        self._connections = Connections(LIMITS)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        await self.answering.wait()
        for message in ANSWER:
            await send(message)

    def connect(self, address: str = "10.0.0.1") -> tuple[BoundedHttpProtocol, Socket]:
        protocol = BoundedHttpProtocol(
            config=self._config,
            server_state=self._state,
            app_state={},
            _loop=self.loop,
            connections=self._connections,
        )
        socket = Socket(address)
        protocol.connection_made(socket)
        return protocol, socket


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.mark.parametrize(
    ("begin", "closed_at_s", "status"),
    [
        pytest.param(b"", 10, None, id="silent"),
        pytest.param(b"POST / HT", 10, 408, id="half-a-head"),
        # Of a million bytes three seconds' worth came: 30 s + 3 s.
        pytest.param(HEAD + b"x" * 3 * MIN_BODY_BYTES_PER_S, 33, 408, id="half-a-body"),
    ],
)
async def test_what_is_not_completed_in_time_ends(server, begin, closed_at_s, status) -> None:
    protocol, socket = server.connect()
    protocol.data_received(begin)

    server.loop.advance_to(closed_at_s - 0.01)
    assert not socket.is_closing()
    server.loop.advance_to(closed_at_s)

    assert socket.is_closing()
    assert socket.status == status


async def test_a_head_that_trickles_has_no_longer_than_one_that_stands_still(server) -> None:
    protocol, socket = server.connect()
    for second in range(10):
        server.loop.advance_to(second)
        protocol.data_received(b"POST / HTT"[second : second + 1])

    server.loop.advance_to(10)

    assert socket.status == 408


async def test_a_body_at_the_least_rate_is_read_however_large(server) -> None:
    protocol, socket = server.connect()
    protocol.data_received(HEAD)
    for second in range(1_000_000 // MIN_BODY_BYTES_PER_S):
        server.loop.advance_to(second)
        protocol.data_received(b"x" * MIN_BODY_BYTES_PER_S)

    assert server.loop.now_s > LIMITS.body_timeout_s
    assert not socket.is_closing()


async def test_an_answer_may_take_its_time_and_then_the_next_request(server) -> None:
    """A second head that comes meanwhile, and is not read, waits with it."""
    protocol, socket = server.connect()
    protocol.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HT")
    server.loop.advance_to(3600)
    assert not socket.is_closing()

    server.answering.set()
    while socket.status is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert socket.status == 200
    server.loop.advance_to(3621)

    assert socket.status == 408


async def test_empty_lines_between_requests_hold_no_connection(server) -> None:
    protocol, socket = server.connect()
    server.answering.set()
    protocol.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    while socket.status is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    server.loop.advance_to(74)
    protocol.data_received(b"\r\n")

    server.loop.advance_to(84)

    assert socket.is_closing()


ENOUGH = 60 * MIN_BODY_BYTES_PER_S  # to be read in the time that there is for some


async def test_an_answer_that_is_complete_and_not_read_ends_its_connection(server) -> None:
    protocol, socket = server.connect()
    server.answering.set()
    socket.num_unread = 10
    protocol.data_received(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    while socket.status is None:  # noqa: ASYNC110
        await asyncio.sleep(0)

    server.loop.advance_to(59.9)
    assert not socket.is_cut
    server.loop.advance_to(60)

    assert socket.is_cut


async def test_a_large_answer_may_be_read_at_the_least_rate_and_no_slower(server) -> None:
    protocol, socket = server.connect()
    protocol.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    socket.num_unread = 4 * ENOUGH
    protocol.pause_writing()
    for minute in (1, 2, 3):
        socket.num_unread -= ENOUGH
        server.loop.advance_to(60 * minute)
    assert not socket.is_cut

    socket.num_unread -= ENOUGH - 1
    server.loop.advance_to(240)

    assert socket.is_cut
    protocol.connection_lost(None)  # nobody waits for the rest to be read


async def test_a_stream_that_is_read_in_time_has_no_clock(server) -> None:
    protocol, socket = server.connect()
    protocol.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    socket.num_unread = 1000
    protocol.pause_writing()
    server.loop.advance_to(59)
    protocol.resume_writing()

    server.loop.advance_to(3600)

    assert not socket.is_cut


async def test_connections_beyond_the_limits_are_refused_until_others_end(server) -> None:
    first, _ = server.connect("10.0.0.1")
    server.connect("10.0.0.1")
    third, refused = server.connect("10.0.0.1")
    assert refused.status == 503
    third.connection_lost(None)
    _, other = server.connect("10.0.0.2")
    fourth, refused = server.connect("10.0.0.3")
    assert (other.status, refused.status) == (None, 503)
    fourth.connection_lost(None)

    first.connection_lost(None)
    _, taken = server.connect("10.0.0.1")

    assert taken.status is None


@pytest.mark.parametrize(("method", "answers"), [(b"GET", True), (b"HEAD", True), (b"POST", False)])
async def test_what_is_short_is_answered_though_the_client_has_closed_its_side(
    server, method, answers
) -> None:
    protocol, socket = server.connect()
    protocol.data_received(method + b" / HTTP/1.1\r\nhost: x\r\n\r\n")

    stays_open = protocol.eof_received()
    server.answering.set()
    while answers and socket.status is None:  # noqa: ASYNC110
        await asyncio.sleep(0)

    assert stays_open is answers
    assert socket.is_closing() is answers  # after the answer; else asyncio closes it
    assert (b"connection: close" in socket.written) is answers


async def test_a_connection_without_a_request_ends_with_its_client_s_side(server) -> None:
    protocol, socket = server.connect()
    server.answering.set()
    assert not protocol.eof_received()
    protocol.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    while socket.status is None:  # noqa: ASYNC110
        await asyncio.sleep(0)

    assert not protocol.eof_received()
