"""One HTTP response of server-sent events, written to by several answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Send

from services.gateway.http.protocol import StreamedBody

KEEPALIVE_COMMENT = b": keep-alive\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not hold tokens back
]


class EventStream:
    """Writes whole events, in the order of the calls."""

    def __init__(self, send: Send, body: StreamedBody) -> None:
        """Begin and end the response with `send`; events go straight into its body."""
        self.body = body
        self._send = send
        self._num_writes = 0

    async def start(self) -> None:
        self.body.begin()
        await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})

    def write(self, events: bytes) -> None:
        """Write now, whether or not the socket takes it."""
        self._num_writes += 1
        self.body.write(events)

    async def send(self, events: bytes) -> None:
        """Write as soon as the socket takes it."""
        await self.body.opened()
        self.write(events)

    async def end(self, events: bytes) -> None:
        """Write the last events and end the response."""
        await self.send(events)
        self.body.flush()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    @asynccontextmanager
    async def kept_alive(self, interval_s: float) -> AsyncIterator[None]:
        """While the block runs, write a comment, which readers skip, after each `interval_s`
        without a write, so that no proxy takes the connection for dead; never if it is 0.
        """
        if not interval_s:
            yield
            return
        keeping = asyncio.create_task(self._keep_alive(interval_s))
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])

    async def _keep_alive(self, interval_s: float) -> None:
        while True:
            num_before = self._num_writes
            await asyncio.sleep(interval_s)
            if self._num_writes == num_before:
                await self.send(KEEPALIVE_COMMENT)
