"""Counts what sessions hold against what the engine holds, and lets go of what one side only has.

Each side gives a request up by itself, and tells the other. Should that fail, a request would take
a place for good: of the live ones in a session, of the batch in the engine.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from services.executor.metrics import ORPHANS
from services.executor.types import HeldRequests

log = structlog.get_logger()

INTERVAL_S = 5.0  # between two looks; what is lost for good can wait for two of them


class SessionsSide(Protocol):
    """The gateways' sessions; see `services.executor.serving.front.Front`."""

    def held(self) -> frozenset[str]: ...
    def lose(self, engine_ids: Collection[str]) -> None: ...


class EngineSide(Protocol):
    """See `services.executor.engine.engine.Engine`."""

    async def held(self) -> HeldRequests: ...
    def abort(self, engine_ids: Sequence[str]) -> None: ...


@dataclass(frozen=True, slots=True)
class Orphans:
    """Requests that one side only has, by the engine's ids."""

    sessions: frozenset[str] = frozenset()  # no output of theirs can come any more
    engine: frozenset[str] = frozenset()  # no session takes their output

    def __and__(self, other: "Orphans") -> "Orphans":
        return Orphans(self.sessions & other.sessions, self.engine & other.engine)


class Accounts:
    """Looks at both sides in turn; an orphan of two successive looks is let go of.

    Adds, aborts and looks reach the engine in the order of their sending, and so do outputs and
    answers to looks on their way back: a request on its way in, out or to its end is an orphan of
    one look at most.
    """

    def __init__(self, sessions: SessionsSide, engine: EngineSide) -> None:
        self._sessions = sessions
        self._engine = engine
        self._suspects = Orphans()  # of the look before

    async def run(self) -> None:
        """Look every now and then until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.look()
            except Exception:
                log.warning("accounts_not_settled", exc_info=True)

    async def look(self) -> None:
        """Compare both sides, and let go of what was an orphan at the look before as well."""
        before = self._sessions.held()
        engine = await self._engine.held()
        after = self._sessions.held()
        orphans = Orphans(
            (before & after) - (engine.answered & engine.computed),
            (engine.answered | engine.computed) - before - after,
        )
        lost, self._suspects = orphans & self._suspects, orphans
        self._let_go(lost)

    def _let_go(self, lost: Orphans) -> None:
        for side, engine_ids in (("sessions", lost.sessions), ("engine", lost.engine)):
            for engine_id in sorted(engine_ids):
                log.error("orphan_let_go", side=side, engine_request_id=engine_id)
                ORPHANS.labels(side).inc()
        self._engine.abort(sorted(lost.sessions | lost.engine))
        self._sessions.lose(lost.sessions)
