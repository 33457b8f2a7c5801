"""HTTP/1.1 on one connection, as uvicorn reads it, with bounded heads and refusals in JSON."""

import asyncio
from asyncio import Transport
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.openai import errors as openai_errors
from services.gateway.openai.responses import encode_json

MAX_HEAD_BYTES = 64 << 10  # request line and headers
BODY = "evenflow.body"  # in a scope: the response's ChunkedBody


class _HeadTooLargeError(Exception):
    """Stops the parser."""


class ChunkedBody:
    """Writes the body of a response that was begun without a length, chunk by chunk, as ASGI's
    `send` would, but in a plain call.

    Chunks go to the socket at the end of this turn of the event loop. When tokens of many bodies
    are due in one turn, their system calls then follow one another, which is cheaper than between
    two pieces of Python (docs/gateway.md).
    """

    def __init__(self, transport: Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow
        self._loop = asyncio.get_running_loop()
        self._unsent = b""

    @property
    def is_open(self) -> bool:
        """Say whether the client keeps up: more than the socket takes is buffered otherwise."""
        return not self._flow.write_paused

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
        self._unsent += b"%x\r\n%b\r\n" % (len(data), data)

    def flush(self) -> None:
        """Hand what was written to the socket now; drop it if the client is gone."""
        unsent, self._unsent = self._unsent, b""
        if unsent and not self._transport.is_closing():
            self._transport.write(unsent)


class BoundedHttpProtocol(HttpToolsProtocol):
    """Refuses a request whose head, or trailer of a chunked body, is too large with 431, however
    slowly it comes, and what is no HTTP with 400. The connection ends with either.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = False
        self._num_silent_bytes = 0  # read since the parser last told of something complete
        self._is_too_large = False

    def data_received(self, data: bytes) -> None:
        self._num_silent_bytes += len(data)
        super().data_received(data)
        if self._num_silent_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            if not self._is_in_head and self.cycle is not None and self.cycle.response_started:
                self.transport.close()
            else:
                self._refuse(431)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[BODY] = ChunkedBody(self.transport, self.flow)  # type: ignore[literal-required]
        self._is_in_head, self._num_silent_bytes = True, 0

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._is_too_large = True
            raise _HeadTooLargeError
        self._is_in_head, self._num_silent_bytes = False, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_silent_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser stopped at."""
        self._refuse(431 if self._is_too_large else 400)

    def _refuse(self, status: int) -> None:
        reason = HTTPStatus(status).phrase
        message = f"{reason.lower()}: the head may have {MAX_HEAD_BYTES} bytes"
        if status == HTTPStatus.BAD_REQUEST:
            message = "the request is not valid HTTP"
        body = encode_json(openai_errors.error_body(status, message)).encode()
        head = (
            f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
