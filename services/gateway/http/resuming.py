"""HTTP responses whose readers may leave and come back: each event says what its reader has."""

import asyncio
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.errors import CancelledRequestError
from services.gateway.http.answers import Form, GeneratedAnswers
from services.gateway.http.edge import while_connected
from services.gateway.http.event_stream import EventStream
from services.gateway.http.protocol import BODY
from services.gateway.live.dispatcher import Dispatcher
from services.gateway.resumable.stream import STEPS_AT_A_TIME, ResumableStream, Step
from services.gateway.resumable.streams import ResumableStreams
from services.gateway.types import Finish, GenerationRequest, RequestId, Token
from services.generation.finish import FinishReason
from services.kit.errors import InvalidRequestError

LAST_EVENT_ID = "Last-Event-ID"
STARTING_AFTER = "starting_after"
MAX_ID_CHARACTERS = 2_048
MAX_DIGITS = 12
_END_OF_EVENT = b"\n\n"
_SUPERSEDED = b": read elsewhere from here on\n\n"
EVENT_ID = re.compile(r"([A-Za-z0-9_.:-]+)/[0-9]+(\.[0-9]+)*(\+[0-9]+)?")


@dataclass(frozen=True, slots=True)
class LastEvent:
    """What a client says that it has had."""

    is_it: Callable[[bytes], bool]
    name: str  # of the header or parameter that says so


class NumberedEvents:
    """Writes the events of a stream, from its beginning, each with its id: `REQUEST/C`, C being the
    tokens that its reader has of each answer (`17`; `17.4.0` of three). Where an event is not the
    last one of a token, or no token's, it has the tokens before it and a number: `REQUEST/17+1`.
    """

    def __init__(self, stream: ResumableStream) -> None:
        self.num_steps = 0  # whose events were written
        self._stream = stream
        self._form: Form = stream.form
        self._writers = [
            self._form.writer(index, num_prompt_tokens)
            for index, num_prompt_tokens in enumerate(stream.num_prompt_tokens)
        ]
        self._num_tokens = [0] * stream.num_answers
        self._num_since = 0  # events after those tokens
        self._finishes: dict[int, Finish] = {}

    def beginning(self) -> list[bytes]:
        """Return the events before the first step."""
        return self._numbered(b"".join(writer.beginning() for writer in self._writers))

    def of(self, index: int, step: Step) -> list[bytes]:
        """Return the events of the next step."""
        self.num_steps += 1
        writer = self._writers[index]
        if isinstance(step, Token):
            said = b""
            if not self._num_tokens[index] and (prompt := self._stream.prompts.get(index)):
                said = writer.prompt(prompt)
            return self._numbered(said + writer.tokens([step]), of_token=index)
        if isinstance(step, Exception):
            return self._numbered(self._form.failure(step))
        if step.reason is FinishReason.CANCELLED:
            cancelled = CancelledRequestError("the request was cancelled")
            return self._numbered(self._form.failure(cancelled))
        self._finishes[index] = step
        said = writer.ending(step)
        if len(self._finishes) == len(self._writers):
            said += self._form.last_events([self._finishes[k] for k in sorted(self._finishes)])
        return self._numbered(said)

    async def after(self, last: LastEvent) -> bytes:
        """Write what was handed out until an event is `last`, and return what comes after it in the
        same step. Raises InvalidRequestError if there is no such event.
        """
        events = self.beginning()
        while True:
            for number, event in enumerate(events, 1):
                if last.is_it(event):
                    return b"".join(events[number:])
            if self.num_steps >= self._stream.num_steps:
                rule = "is of no event that was sent"
                raise InvalidRequestError(f"{last.name}: {rule}", field=last.name)
            if not self.num_steps % STEPS_AT_A_TIME:
                await asyncio.sleep(0)
            events = self.of(*self._stream.step(self.num_steps))

    def _numbered(self, said: bytes, of_token: int | None = None) -> list[bytes]:
        """Return events with their ids; the last one completes the next token of that answer."""
        events = said.split(_END_OF_EVENT)[:-1]
        numbered = []
        for number, event in enumerate(events, 1):
            if of_token is not None and number == len(events):
                break
            self._num_since += 1
            numbered.append(b"id: %b+%d\n%b\n\n" % (self._place(), self._num_since, event))
        if of_token is not None:
            self._num_tokens[of_token] += 1
            self._num_since = 0
            if events:
                numbered.append(b"id: %b\n%b\n\n" % (self._place(), events[-1]))
        return numbered

    def _place(self) -> bytes:
        counts = ".".join(map(str, self._num_tokens))
        return f"{self._stream.request_id}/{counts}".encode()


class _EventReader:
    """Reads a stream over HTTP."""

    def __init__(self, events: NumberedEvents, out: EventStream) -> None:
        self._events = events
        self._out = out

    @property
    def is_open(self) -> bool:
        return self._out.body.is_open

    async def opened(self) -> None:
        await self._out.body.opened()

    def take(self, index: int, step: Step) -> None:
        if events := self._events.of(index, step):
            self._out.write(b"".join(events))


def last_event_by_id(request_id: RequestId, stated: str, name: str) -> LastEvent:
    """Return the event of a request that has the id `stated`. Raises InvalidRequestError naming the
    header or parameter if it is no id, or another request's.
    """
    found = EVENT_ID.fullmatch(stated) if len(stated) <= MAX_ID_CHARACTERS else None
    if found is None:
        raise InvalidRequestError(f"{name}: must be the id of an event, REQUEST/TOKENS", field=name)
    if found[1] != request_id:
        raise InvalidRequestError(f"{name}: is of another request", field=name)
    line = f"id: {stated}\n".encode()
    return LastEvent(lambda event: event.startswith(line), name)


def last_event_by_number(stated: str, name: str) -> LastEvent:
    """Return the event of a response that has the `sequence_number` `stated`. Raises
    InvalidRequestError naming the parameter if it is none.
    """
    if not (stated.isascii() and stated.isdecimal() and len(stated) <= MAX_DIGITS):
        raise InvalidRequestError(f"{name}: must be a sequence_number", field=name)
    numbers = itertools.count()
    return LastEvent(lambda _: next(numbers) == int(stated), name)


class ResumableAnswers(GeneratedAnswers):
    """Begins a stream of answers, which goes on for a while when its client goes away."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        requests: Sequence[GenerationRequest],
        form: Form,
        *,
        streams: ResumableStreams,
        keepalive_s: float,
    ) -> None:
        """Write a comment after `keepalive_s` without an event; 0: never."""
        super().__init__(dispatcher, requests, form)
        self._streams = streams
        self._keepalive_s = keepalive_s

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = await self._streams.begin(self._requests, self._form)
        self._note_clipped(scope, stream.generations)
        events = NumberedEvents(stream)
        out = EventStream(send, scope[BODY])
        await _relay(stream, events, b"".join(events.beginning()), out, self._keepalive_s)


class TakenUpStream(Response):
    """Goes on with a stream behind the last event that its client has had, or from its beginning.
    Without an answer's rest it is 204, after which no `EventSource` asks again.
    """

    def __init__(
        self, stream: ResumableStream, last: LastEvent | None, *, keepalive_s: float
    ) -> None:
        super().__init__()
        self._stream = stream
        self._last = last
        self._keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream, last = self._stream, self._last
        events = NumberedEvents(stream)
        first = b"".join(events.beginning()) if last is None else await events.after(last)
        if not first and stream.is_over and events.num_steps == stream.num_steps:
            await Response(status_code=204)(scope, receive, send)
            return
        out = EventStream(send, scope[BODY])
        await _relay(stream, events, first, out, self._keepalive_s)


async def _relay(
    stream: ResumableStream,
    events: NumberedEvents,
    first: bytes,
    out: EventStream,
    keepalive_s: float,
) -> None:
    """Write `first` and all events of the steps after those whose events were written."""
    await out.start()
    async with out.kept_alive(keepalive_s):
        if first:
            out.write(first)
        is_whole = await stream.read(_EventReader(events, out), events.num_steps)
    await out.end(b"" if is_whole else _SUPERSEDED)
