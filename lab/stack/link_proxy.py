"""A link between two processes that a test may cut, or make silent."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from lab.stack.ports import free_port

MAX_PIECE_BYTES = 1 << 16


class LinkProxy:
    """Passes bytes on between whoever connects to `address` and `target`, in a thread of its own.

    with LinkProxy("127.0.0.1:50051") as link:
        link.cut()  # both ends see a connection that is gone; the next one works
        with link.silent():  # neither end hears anything, and nothing closes
            ...
        with link.slow(0.2):  # what is said takes so many seconds longer
            ...
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.address = f"127.0.0.1:{free_port()}"
        self._loop: asyncio.AbstractEventLoop
        self._speaks = asyncio.Event()
        self._delay_s = 0.0  # of each piece
        self._connections: set[asyncio.Task[None]] = set()
        self._listens = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        self._listens.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def cut(self) -> None:
        """Close all connections that there are."""
        self._loop.call_soon_threadsafe(self._cut)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Pass nothing on while the block runs; what came meanwhile is passed on at its end."""
        self._loop.call_soon_threadsafe(self._speaks.clear)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._speaks.set)

    @contextmanager
    def slow(self, delay_s: float) -> Iterator[None]:
        """Pass each piece on so much later while the block runs; pieces keep their order."""
        self._delay_s = delay_s
        try:
            yield
        finally:
            self._delay_s = 0.0

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._speaks.set()
        host, port = self.address.split(":")
        listening = asyncio.start_server(self._take, host, int(port))
        server = self._loop.run_until_complete(listening)
        self._listens.set()
        self._loop.run_forever()
        server.close()
        self._cut()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _cut(self) -> None:
        for connection in self._connections:
            connection.cancel()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        writers = [writer]
        try:
            host, port = self.target.split(":")
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            writers.append(far_writer)
            ends = (self._pass_on(reader, far_writer), self._pass_on(far_reader, writer))
            passing = [asyncio.ensure_future(end) for end in ends]
            try:
                await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in passing:
                    one.cancel()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            for one in writers:
                one.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(MAX_PIECE_BYTES):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                await self._speaks.wait()
                writer.write(piece)
                await writer.drain()
