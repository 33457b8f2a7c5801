"""How far readers are, on its way into the scheduler's process."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

log = structlog.get_logger()

INTERVAL_S = 0.05  # at most one call in this time, for all requests together


class DeliveryRelay:
    """Merges counts and passes on the newest of each request while `run` runs.

    One call is in flight at a time, so that a long engine step delays counts and piles up nothing:
    what is pending is bounded by the number of live requests.
    """

    def __init__(self, call: Callable[[dict[str, int]], Awaitable[object]]) -> None:
        """`call` takes counts by the engine's request ids."""
        self._call = call
        self._pending: dict[str, int] = {}
        self._changed = asyncio.Event()

    def note(self, engine_id: str, num_delivered: int) -> None:
        """Note how many tokens of a request its reader has. Returns at once."""
        self._pending[engine_id] = num_delivered
        self._changed.set()

    async def run(self) -> None:
        """Pass counts on until cancelled. Counts are absolute: newer ones make up for a loss."""
        loop = asyncio.get_running_loop()
        while True:
            await self._changed.wait()
            self._changed.clear()
            counts, self._pending = self._pending, {}
            next_call_s = loop.time() + INTERVAL_S
            try:
                await self._call(counts)
            except Exception:
                log.warning("delivered_counts_lost", num_reqs=len(counts), exc_info=True)
            await asyncio.sleep(next_call_s - loop.time())
