"""Ends requests in both halves of vLLM: its output processor and its engine."""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import structlog
from vllm.v1.engine.exceptions import EngineDeadError

log = structlog.get_logger()


class OutputSide(Protocol):
    """The part of vLLM's `OutputProcessor` that is called here."""

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]: ...


class CoreSide(Protocol):
    """The part of vLLM's `AsyncMPClient` that is called here."""

    async def abort_requests_async(self, request_ids: list[str]) -> None: ...


class Aborts:
    """Aborts under way. The engine hears of each, whatever the output processor makes of it."""

    def __init__(self, outputs: OutputSide, core: CoreSide) -> None:
        self._outputs = outputs
        self._core = core
        self._under_way: set[asyncio.Task[None]] = set()

    def start(self, engine_ids: Sequence[str]) -> None:
        """End requests soon; unknown and ended ones are ignored by both halves. Returns at once."""
        if not engine_ids:
            return
        task = asyncio.create_task(self._abort(list(engine_ids)), name="abort")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _abort(self, engine_ids: list[str]) -> None:
        for engine_id in engine_ids:
            try:
                self._outputs.abort_requests([engine_id], internal=True)
            except Exception:
                log.exception("abort_not_answered", engine_request_id=engine_id)
        with contextlib.suppress(EngineDeadError):
            await self._core.abort_requests_async(engine_ids)
