"""Open watches of this process, so that a drain need not wait for streams that never end."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from services.kit.errors import UnavailableError
from services.tracker.metrics import WATCHERS
from services.tracker.types import Change


class StoppingError(UnavailableError):
    """This tracker stops; watch another one, or its successor."""

    reason = "STOPPING"


class Watches:
    """Hands changes through until `end`."""

    def __init__(self) -> None:
        self._ended = False
        self._waits: set[asyncio.Timeout] = set()

    async def follow(self, changes: AsyncGenerator[Change, None]) -> AsyncGenerator[Change, None]:
        """Yield what `changes` yields, and close it. Raises StoppingError after `end`."""
        with WATCHERS.track_inprogress():
            async with aclosing(changes):
                while True:
                    yield await self._next(changes)

    def end(self) -> None:
        """End all open watches, and every later one at its start."""
        self._ended = True
        for wait in self._waits:
            wait.reschedule(asyncio.get_running_loop().time())

    async def _next(self, changes: AsyncGenerator[Change, None]) -> Change:
        if self._ended:
            raise StoppingError("the tracker is stopping")
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._waits.add(wait)
                return await anext(changes)
        except TimeoutError as error:
            raise StoppingError("the tracker is stopping") from error
        finally:
            self._waits.discard(wait)
