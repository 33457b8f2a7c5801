"""The HTTP response that shows engines at work, as server-sent events."""

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.executors.watches import Watches
from services.gateway.http.edge import while_connected
from services.gateway.http.event_stream import EventStream
from services.gateway.http.protocol import BODY
from services.kit.errors import InvalidRequestError

DEFAULT_UPDATES_PER_S = 2.0
MAX_UPDATES_PER_S = 20.0  # of each executor
DEFAULT_HOLDERS, MAX_HOLDERS = 100, 1_000  # entries of each list


def updates_per_s(stated: str | None) -> float:
    """Return how often a client wants updates. Raises InvalidRequestError."""
    try:
        rate = DEFAULT_UPDATES_PER_S if stated is None else float(stated)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= MAX_UPDATES_PER_S:
        rule = f"must be above 0 and at most {MAX_UPDATES_PER_S:g}"
        raise InvalidRequestError(f"max_updates_per_s: {rule}", field="max_updates_per_s")
    return rate


def holders_limit(stated: str | None) -> int:
    """Return how many entries of a kind a client wants. Raises InvalidRequestError."""
    try:
        limit = DEFAULT_HOLDERS if stated is None else int(stated)
    except ValueError:
        limit = 0
    if not 0 < limit <= MAX_HOLDERS:
        rule = f"must be a whole number from 1 to {MAX_HOLDERS}"
        raise InvalidRequestError(f"limit: {rule}", field="limit")
    return limit


class WatchedEngines(Response):
    """An event per update of an executor, until the client or the gateway leaves."""

    def __init__(self, watches: Watches, *, max_updates_per_s: float, keepalive_s: float) -> None:
        """Write a comment after `keepalive_s` without an event; 0: never."""
        super().__init__()
        self._watches = watches
        self._max_updates_per_s = max_updates_per_s
        self._keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._run(scope, send))

    async def _run(self, scope: Scope, send: Send) -> None:
        stream = EventStream(send, scope[BODY])

        async def event(update: bytes) -> None:
            await stream.send(b"data: %b\n\n" % update)

        await stream.start()
        async with stream.kept_alive(self._keepalive_s):
            await self._watches.relay(event, max_updates_per_s=self._max_updates_per_s)
        await stream.end(b"")
