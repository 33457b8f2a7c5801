"""HTTP/1.1 on one connection, as uvicorn reads it, with bounded heads, bounded times and refusals
in JSON. No other protocol is gone over to.
"""

import asyncio
from asyncio import Transport
from collections import Counter
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway.openai import errors as openai_errors
from services.gateway.openai.responses import encode_json

MAX_HEAD_BYTES = 64 << 10  # request line and headers
MIN_BODY_BYTES_PER_S = 16 << 10  # what a body may take beyond its time; answers are read as fast
BODY = "evenflow.body"  # in a scope: the response's StreamedBody
SAFE_METHODS = ("GET", "HEAD")


_EXPLANATIONS = {
    400: "the request is not valid HTTP, or does not name one host",
    408: "the request came too slowly",
    431: f"the head may have {MAX_HEAD_BYTES} bytes",
    503: "too many connections",
}


def refusal(status: int) -> dict[str, Any]:
    """Return the body of a response that ends its connection."""
    message = f"{HTTPStatus(status).phrase.lower()}: {_EXPLANATIONS[status]}"
    return openai_errors.error_body(status, message)


class _HeadError(Exception):
    """Stops the parser."""


class StreamedBody:
    """Writes the body of a response that has no length, chunk by chunk, as ASGI's `send` would,
    but in a plain call. To a client of HTTP/1.0, which knows no chunks, it goes as it is, and ends
    with the connection.

    Chunks go to the socket at the end of this turn of the event loop. When tokens of many bodies
    are due in one turn, their system calls then follow one another, which is cheaper than between
    two pieces of Python (docs/gateway.md).
    """

    def __init__(
        self, transport: Transport, flow: FlowControl, plain: RequestResponseCycle | None = None
    ) -> None:
        """`plain`: the exchange with a client of HTTP/1.0."""
        self._transport = transport
        self._flow = flow
        self._plain = plain
        self._loop = asyncio.get_running_loop()
        self._unsent = b""
        self.has_begun = False
        self.client_closed = False  # its side

    @property
    def is_open(self) -> bool:
        """Say whether the client keeps up: more than the socket takes is buffered otherwise."""
        return not self._flow.write_paused

    def begin(self) -> None:
        """Have the head, which is sent next, say how this body goes; a client that may have left
        gets none, for it may be long.
        """
        self.has_begun = True
        if self.client_closed:
            self._transport.close()
        if self._plain is not None:
            self._plain.chunked_encoding = False

    async def opened(self) -> None:
        """Wait until the client keeps up with all that was written, or is gone."""
        self.flush()
        while self._flow.write_paused:
            await self._flow.drain()

    def write(self, data: bytes) -> None:
        """Write a chunk; nothing if `data` is empty."""
        if not data:
            return
        if not self._unsent:
            self._loop.call_soon(self.flush)
        chunk = data if self._plain else b"%x\r\n%b\r\n" % (len(data), data)
        self._unsent += chunk

    def flush(self) -> None:
        """Hand what was written to the socket now; drop it if the client is gone."""
        unsent, self._unsent = self._unsent, b""
        if unsent and not self._transport.is_closing():
            self._transport.write(unsent)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What connections may take. Idle ones between two requests are uvicorn's to end."""

    head_timeout_s: float  # until a head is complete, > 0
    body_timeout_s: float  # until a body is, beyond its bytes / MIN_BODY_BYTES_PER_S, > 0
    reader_timeout_s: float  # for what is written to be read, or as much of it as at that rate, > 0
    max_connections: int  # at a time, >= 1
    max_connections_per_address: int  # of one client, or of one proxy, >= 1


class Connections:
    """Counts the open connections of one server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._num_open = 0
        self._num_by_address: Counter[str] = Counter()

    def enter(self, address: str) -> bool:
        """Count one more; False if it is one too many, and to be counted out all the same."""
        self._num_open += 1
        self._num_by_address[address] += 1
        return (
            self._num_open <= self.limits.max_connections
            and self._num_by_address[address] <= self.limits.max_connections_per_address
        )

    def leave(self, address: str) -> None:
        """Count one less."""
        self._num_open -= 1
        self._num_by_address[address] -= 1
        if not self._num_by_address[address]:
            del self._num_by_address[address]


class BoundedHttpProtocol(HttpToolsProtocol):
    """Refuses a request whose head, or trailer of a chunked body, is too large with 431, however
    slowly it comes, one that comes too slowly with 408, what is no HTTP with 400, and a connection
    too many with 503. The connection ends with each; one that stays silent ends without a word,
    and so does one whose client does not read.
    """

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counted = connections
        self._limits = connections.limits
        self._address = ""
        self._timer: asyncio.TimerHandle | None = None  # while something has to come
        self._reading: asyncio.TimerHandle | None = None  # while a complete answer is to be read
        self._since_s = self._timeout_s = 0.0  # when it was begun, and how long it may take
        self._num_body_bytes = 0
        self._is_in_head = True
        self._num_silent_bytes = 0  # read since the parser last told of something complete
        self._is_too_large = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        if self._counted.enter(self._address):
            self._expect_within(self._limits.head_timeout_s)
        else:
            self._refuse(503)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        self._stop_reading_clock()
        self._counted.leave(self._address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._num_silent_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._timer is None and not self._is_answering:  # empty lines between two requests
            self._expect_within(self._limits.head_timeout_s)
        if self._num_silent_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            if not self._is_in_head and self.cycle is not None and self.cycle.response_started:
                self.transport.close()
            else:
                self._refuse(431)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer what a client has got to ask before it closed its side, unless that may be long:
        one that has left looks the same, and nothing is to be generated or streamed for it.
        """
        if self.pipeline or not self._is_answering or self.scheme == "https":  # TLS has no half
            return False
        scope = self.cycle.scope
        body: StreamedBody = scope[BODY]  # type: ignore[literal-required]
        if scope["method"] not in SAFE_METHODS or body.has_begun:
            return False
        body.client_closed = True
        self.cycle.keep_alive = False
        return True

    def _parse(self, data: bytes) -> None:
        """Read on. Where a client asks for another protocol the parser stops behind the head; it
        is begun anew with a head that does not ask, because the body comes as it would without.
        """
        unread = [memoryview(data)]  # the next is the last
        while unread and not self.transport.is_closing():
            piece = unread.pop()
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as stopped:
                unread += [piece[stopped.args[0] :], memoryview(self._plain_head())]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            except httptools.HttpParserError:
                self._refuse(431 if self._is_too_large else 400)

    def _plain_head(self) -> bytes:
        """Return the head that was read last, without the wish for another protocol."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % line for line in self.headers if line[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    @property
    def _asks_for_upgrade(self) -> bool:
        return bool(self.parser.should_upgrade())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_silent_bytes = True, 0
        self._expect_within(self._limits.head_timeout_s)

    def on_headers_complete(self) -> None:
        self._check_head()
        if self._asks_for_upgrade:
            return
        self._is_in_head, self._num_silent_bytes = False, 0
        self._expect_within(self._limits.body_timeout_s)
        super().on_headers_complete()
        plain = self.cycle if self.scope["http_version"] == "1.0" else None
        body = StreamedBody(self.transport, self.flow, plain)
        self.scope[BODY] = body  # type: ignore[literal-required]  # the application has not run yet

    def _check_head(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        self._is_too_large = size > MAX_HEAD_BYTES
        num_hosts = [name for name, _ in self.headers].count(b"host")
        num_needed = 0 if self.parser.get_http_version() == "1.0" else 1  # RFC 9112, 3.2
        is_tunnel = self.parser.get_method() == b"CONNECT"
        if self._is_too_large or is_tunnel or not num_needed <= num_hosts <= 1:
            raise _HeadError

    def on_body(self, body: bytes) -> None:
        self._num_silent_bytes = 0
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._asks_for_upgrade:
            return
        self._num_silent_bytes = 0
        self._expect_nothing()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_reading_clock()
        if not self._is_answering:
            self._expect_reading()

    def on_response_complete(self) -> None:
        if self._reading is None:
            self._expect_reading()
        super().on_response_complete()

    def _expect_reading(self) -> None:
        """Have the client read what is written, or enough of it to go on like that."""
        self._stop_reading_clock()
        if num_bytes := self.transport.get_write_buffer_size():
            check = partial(self._check_reading, num_bytes)
            self._reading = self.loop.call_later(self._limits.reader_timeout_s, check)

    def _stop_reading_clock(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _check_reading(self, num_bytes: int) -> None:
        """Cut the connection of a client that has read too little of so many bytes."""
        num_read = num_bytes - self.transport.get_write_buffer_size()
        if num_read < min(num_bytes, MIN_BODY_BYTES_PER_S * self._limits.reader_timeout_s):
            self.transport.abort()
        else:
            self._expect_reading()

    def _expect_within(self, timeout_s: float) -> None:
        """Have the client complete what it has begun in so many seconds."""
        self._expect_nothing()
        self._since_s, self._timeout_s, self._num_body_bytes = self.loop.time(), timeout_s, 0
        self._timer = self.loop.call_later(timeout_s, self._check_pace)

    def _expect_nothing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_pace(self) -> None:
        """End the connection, unless the client has been fast enough, or waits for an answer."""
        if self.pipeline or (self._is_in_head and self._is_answering):
            self._since_s = self.loop.time()
        earned_s = self._num_body_bytes / MIN_BODY_BYTES_PER_S
        left_s = self._since_s + self._timeout_s + earned_s - self.loop.time()
        if left_s > 0:
            self._timer = self.loop.call_later(left_s, self._check_pace)
        elif self.scope is None or (self._is_answering and self.cycle.response_started):
            self.transport.close()
        else:
            self._refuse(408)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int) -> None:
        reason = HTTPStatus(status).phrase
        body = encode_json(refusal(status)).encode()
        head = (
            f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
        )
        head += "retry-after: 1\r\n\r\n" if status == HTTPStatus.SERVICE_UNAVAILABLE else "\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()
