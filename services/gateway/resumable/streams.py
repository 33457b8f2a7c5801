"""The resumable streams of this gateway, and for how long each is kept."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import structlog

from services.gateway import metrics
from services.gateway.access.api_keys import ApiKey, current_account
from services.gateway.errors import StreamGoneError, UnknownRequestError
from services.gateway.live.dispatcher import Dispatcher
from services.gateway.resumable.stream import ResumableStream
from services.gateway.types import GenerationRequest, RequestId
from services.kit.clock import Clock

log = structlog.get_logger()

LOOK_INTERVAL_S = 1.0
MAX_GONE = 1 << 14  # names of streams that were let go of, which are remembered

Name: TypeAlias = tuple[str, RequestId]  # of a key, and what its client calls the request


class LetGo(Enum):
    """Why a stream is not kept any more."""

    WINDOW = "window"  # its reader has not come back
    BUDGET = "budget"  # others needed the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeLimits:
    """What is kept of streams."""

    window_s: float = 60.0  # after a reader left, > 0
    reader_timeout_s: float = 30.0  # after which a reader that takes nothing has left, > 0
    max_bytes: int = 256 << 20  # of memory; each key may have half of it, >= 1


class ResumableStreams:
    """Finds streams by their names, and lets go of them: those whose readers stay away, and where
    memory runs out those that were left first, at last those that are read since long.
    """

    def __init__(self, dispatcher: Dispatcher, limits: ResumeLimits, *, clock: Clock) -> None:
        self._dispatcher = dispatcher
        self._limits = limits
        self._clock = clock
        self._streams: dict[Name, ResumableStream] = {}
        self._gone: OrderedDict[Name, None] = OrderedDict()

    async def begin(
        self, requests: Sequence[GenerationRequest], form: Any = None
    ) -> ResumableStream:
        """Have executors take all answers. Raises as `Dispatcher.begin_all`. A stream of the same
        name cannot be found any more.
        """
        generations = await self._dispatcher.begin_all(requests)
        request_id = requests[0].parent_id or requests[0].request_id
        stream = ResumableStream(
            request_id, generations, dispatcher=self._dispatcher, clock=self._clock, form=form
        )
        name = _name(request_id)
        if (former := self._streams.pop(name, None)) is not None:
            former.let_go()
        self._streams[name] = stream
        self._gone.pop(name, None)
        return stream

    def named(self, request_id: RequestId) -> ResumableStream:
        """Return the caller's stream of a name. Raises UnknownRequestError, StreamGoneError."""
        name = _name(request_id)
        if (stream := self._streams.get(name)) is not None:
            return stream
        if name in self._gone:
            raise StreamGoneError(request_id)
        raise UnknownRequestError(f'no resumable stream has the id "{request_id}"')

    async def watch(self) -> None:
        """Let go of streams in time, until cancelled; then of all."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await asyncio.sleep(min(LOOK_INTERVAL_S, self._limits.window_s / 4))
                    self.look_over()
                    for stream in self._streams.values():
                        if stream.is_detached:
                            tasks.create_task(stream.keep_rest())
        finally:
            self._streams.clear()
            self.look_over()

    def look_over(self) -> None:
        """Let go of streams whose time is over, and of as many as there is no room for."""
        now_s, limits = self._clock(), self._limits
        for name, stream in [*self._streams.items()]:
            stream.detach_stopped(now_s, limits.reader_timeout_s)
            is_late = now_s - stream.left_s >= limits.window_s
            if stream.is_detached and is_late and not stream.needs_no_reader:
                self._let_go(name, LetGo.WINDOW)
        self._make_room()
        left = [one for one in self._streams.values() if one.is_detached and not one.is_over]
        metrics.DETACHED_STREAMS.set(len(left))

    def _make_room(self) -> None:
        sizes = {name: stream.num_bytes for name, stream in self._streams.items()}
        total, by_key = sum(sizes.values()), Counter[ApiKey | None]()
        for name, stream in self._streams.items():
            by_key[stream.caller] += sizes[name]
        of_key = {key: self._limits.max_bytes // 2 for key in by_key}
        of_key[None] = self._limits.max_bytes  # where no keys are asked for
        if total > of_key[None] or any(by_key[key] > of_key[key] for key in by_key):
            for name in sorted(self._streams, key=self._age_order):
                caller = self._streams[name].caller
                if total > of_key[None] or by_key[caller] > of_key[caller]:
                    self._let_go(name, LetGo.BUDGET)
                    total -= sizes[name]
                    by_key[caller] -= sizes[name]
        metrics.KEPT_STREAM_BYTES.set(total)

    def _age_order(self, name: Name) -> tuple[bool, float]:
        stream = self._streams[name]
        return not stream.is_detached, stream.left_s

    def _let_go(self, name: Name, why: LetGo) -> None:
        stream = self._streams.pop(name)
        if not stream.is_over:
            metrics.STREAMS_LET_GO.labels(why.value).inc()
            log.info("stream_let_go", name=name[1], why=why.value, num_bytes=stream.num_bytes)
        stream.let_go()
        self._gone[name] = None
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)


def _name(request_id: RequestId) -> Name:
    return (current_account(), request_id)
