"""What is known of readers, on its way into the scheduler's process."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import structlog

log = structlog.get_logger()

INTERVAL_S = 0.05  # at most one call in this time, for all requests together


T = TypeVar("T")


class ReaderRelay(Generic[T]):
    """Merges news of one kind and passes on the newest of each request while `run` runs.

    One call is in flight at a time, so that a long engine step delays news and piles up nothing:
    what is pending is bounded by the number of live requests.
    """

    def __init__(self, call: Callable[[dict[str, T]], Awaitable[object]]) -> None:
        """`call` takes what is new, by the engine's request ids."""
        self._call = call
        self._pending: dict[str, T] = {}
        self._changed = asyncio.Event()

    def note(self, engine_id: str, value: T) -> None:
        """Note what is true of a request's reader now. Returns at once."""
        self._pending[engine_id] = value
        self._changed.set()

    async def run(self) -> None:
        """Pass news on until cancelled. All of it is absolute: newer makes up for a loss."""
        loop = asyncio.get_running_loop()
        while True:
            await self._changed.wait()
            self._changed.clear()
            next_call_s = loop.time() + INTERVAL_S
            await self.flush()
            await asyncio.sleep(next_call_s - loop.time())

    async def flush(self) -> None:
        """Pass on at once what is pending: calls that are made after this come behind it."""
        news, self._pending = self._pending, {}
        if not news:
            return
        try:
            await self._call(news)
        except Exception:
            log.warning("reader_news_lost", num_reqs=len(news), exc_info=True)
