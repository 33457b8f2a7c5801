"""HTTP responses that generate: answers as a whole, or as server-sent events."""

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.errors import CancelledRequestError
from services.gateway.http.edge import CLIPPED_PARAMETERS, RETAINED, while_connected
from services.gateway.http.event_stream import EventStream
from services.gateway.http.protocol import BODY
from services.gateway.live.dispatcher import Dispatcher
from services.gateway.live.generation import Generation
from services.gateway.live.side_by_side import side_by_side
from services.gateway.openai.responses import (
    Answer,
    encode_json,
    encode_large_json,
    retention_entry,
)
from services.gateway.types import Finish, GenerationRequest, Token
from services.generation.finish import FinishReason
from services.generation.logprobs import EchoedPrompt, TokenLogprobs
from services.generation.retention import least_of
from services.kit.errors import InvalidRequestError, ServiceError

log = structlog.get_logger()

# Of answers to one call that are not streamed: tokens, probabilities of any, and ids of prompts.
# Kept and written they take some 600 bytes each at most.
MAX_WHOLE_ENTRIES = 1 << 18
LARGE_WHOLE_ENTRIES = 1 << 12  # written off the event loop from here on


class AnswerWriter(Protocol):
    """Formats one streamed answer, as the events of a form."""

    def beginning(self) -> bytes:
        """Return the events that come before any token."""

    def prompt(self, prompt: EchoedPrompt) -> bytes:
        """Return the event that gives the prompt back; none if a later one does."""

    def tokens(self, tokens: Sequence[Token], *, as_one: bool = False) -> bytes:
        """Return the events of tokens, or as few as will do."""

    def ending(self, finish: Finish) -> bytes:
        """Return the events up to how the answer ended."""


class Form(Protocol):
    """How an API writes the answers to one HTTP request."""

    @property
    def limit_name(self) -> str:
        """Return what the client calls the limit of an answer's tokens."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body that has all answers."""

    def writer(self, index: int, num_prompt_tokens: int) -> AnswerWriter:
        """Return what writes answer `index`, from 0, as a stream."""

    def last_events(self, finishes: Sequence[Finish]) -> bytes:
        """Return the events after the endings of all answers."""

    def failure(self, error: Exception) -> bytes:
        """Return the event that is a stream's last if it fails."""


class GeneratedAnswers(Response):
    """Generates while it is sent. Errors before the first byte are raised to the app's handlers;
    when the client goes away the requests are aborted.
    """

    def __init__(
        self, dispatcher: Dispatcher, requests: Sequence[GenerationRequest], form: Form
    ) -> None:
        super().__init__()
        self._dispatcher = dispatcher
        self._requests = requests
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._run(scope, receive, send))

    @abstractmethod
    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def _note_clipped(self, scope: Scope, generations: Sequence[Generation]) -> None:
        """Have the header say to what `max_tokens` was cut: of several prompts, the least."""
        clipped = [g.clipped_max_tokens for g in generations if g.clipped_max_tokens is not None]
        if clipped:
            scope[CLIPPED_PARAMETERS] = {self._form.limit_name: min(clipped)}


class WholeAnswers(GeneratedAnswers):
    """One JSON body at the end. A token counts as delivered when it is taken for the body, so
    that the scheduler sees no deposit where no reader takes one.
    """

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = _WholeSize()
        async with self._dispatcher.generate_all(self._requests) as generations:
            self._note_clipped(scope, generations)
            answers = await side_by_side([self._collected(g, size) for g in generations])
        if (retained := least_of(one.finish.retained for one in answers)) is not None:
            told = retention_entry(retained).items()
            scope[RETAINED] = ", ".join(f"{name}={one}" for name, one in told if one is not None)
        if size.num_entries < LARGE_WHOLE_ENTRIES:
            body = encode_json(self._form.whole(answers))
        else:
            body = await asyncio.to_thread(self._encoded, answers)
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _collected(self, generation: Generation, size: "_WholeSize") -> Answer:
        tokens: list[Token] = []
        num_entries = 0
        async for batch in generation.batches():
            # Its first tokens; again, if it begins again elsewhere.
            if batch[0].index == generation.request.num_delivered_tokens:
                size.take_back(num_entries)
                tokens, num_entries = [], 0
                if prompt := generation.prompt:
                    likely = prompt.logprobs[-1] if prompt.logprobs else None
                    num_entries += size.add(len(prompt.token_ids), None)
                    num_entries += size.add(len(prompt.logprobs), likely)
            num_entries += size.add(len(batch), batch[0].logprobs)
            tokens += batch
        self._dispatcher.drop(generation)
        return Answer(tokens=tokens, finish=_uncancelled(generation), prompt=generation.prompt)

    def _encoded(self, answers: Sequence[Answer]) -> str:
        return encode_large_json(self._form.whole(answers))


class _WholeSize:
    """Counts what the answers to one call hold: tokens, probabilities and ids of prompts."""

    def __init__(self) -> None:
        self.num_entries = 0

    def add(self, num_tokens: int, logprobs: TokenLogprobs | None) -> int:
        """Count tokens with probabilities like these. Returns as how many entries they count.
        Raises InvalidRequestError above the most.
        """
        num_entries = num_tokens * (1 if logprobs is None else 2 + len(logprobs.top))
        self.num_entries += num_entries
        if self.num_entries > MAX_WHOLE_ENTRIES:
            rule = "must be true for answers of this length"
            raise InvalidRequestError(f"stream: {rule}", field="stream")
        return num_entries

    def take_back(self, num_entries: int) -> None:
        """Forget so many entries: the answer that they are of begins again."""
        self.num_entries -= num_entries


class StreamedAnswers(GeneratedAnswers):
    """An event per token, each answer at its own pace. After the status is sent, an error is the
    last event.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        requests: Sequence[GenerationRequest],
        form: Form,
        *,
        keepalive_s: float,
    ) -> None:
        """Write a comment after `keepalive_s` without an event; 0: never."""
        super().__init__(dispatcher, requests, form)
        self._keepalive_s = keepalive_s

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._dispatcher.generate_all(self._requests) as generations:
            self._note_clipped(scope, generations)
            stream = EventStream(send, scope[BODY])
            await stream.start()
            async with stream.kept_alive(self._keepalive_s):
                last = await self._events(generations, stream)
            await stream.end(last)

    async def _events(self, generations: Sequence[Generation], stream: EventStream) -> bytes:
        """Write all answers; return the events that end the stream."""
        try:
            finishes = await side_by_side(
                [self._write(stream, g, index) for index, g in enumerate(generations)]
            )
        except ServiceError as error:
            log.info("stream_failed", error_reason=error.reason, detail=str(error))
            return self._form.failure(error)
        except Exception as error:
            log.exception("stream_crashed")
            return self._form.failure(error)
        return self._form.last_events(finishes)

    async def _write(self, stream: EventStream, generation: Generation, index: int) -> Finish:
        chunks = self._form.writer(index, generation.num_prompt_tokens)
        if beginning := chunks.beginning():
            await stream.send(beginning)
        events = _AnswerEvents(stream, chunks, generation)
        await generation.write_to(events)
        finish = _uncancelled(generation)
        events.pass_over()
        await stream.send(chunks.ending(finish))
        self._dispatcher.drop(generation)  # its place is free, though other answers go on
        return finish


class _AnswerEvents:
    """Turns one answer's tokens into events: the outlet of its generation."""

    def __init__(self, stream: EventStream, chunks: AnswerWriter, generation: Generation) -> None:
        self._stream = stream
        self._chunks = chunks
        self._generation = generation
        self._prompt_is_due = generation.request.wants_its_prompt

    @property
    def is_open(self) -> bool:
        return self._stream.body.is_open

    async def opened(self) -> None:
        await self._stream.body.opened()

    def pass_over(self) -> None:
        """Have the form know what the client has got already, prompt and all, and tell nothing."""
        if delivered := self._generation.continuation.take_delivered():
            self._prompt()
            self._chunks.tokens(delivered, as_one=True)

    def _prompt(self) -> bytes:
        """Return the event that gives the prompt back, if it is time for it."""
        prompt = self._generation.prompt
        if not self._prompt_is_due or prompt is None:
            return b""
        self._prompt_is_due = False
        return self._chunks.prompt(prompt)

    def write(self, tokens: Sequence[Token], *, as_one: bool) -> None:
        self.pass_over()
        if prompt := self._prompt():
            self._stream.write(prompt)
        if events := self._chunks.tokens(tokens, as_one=as_one):
            self._stream.write(events)


def _uncancelled(generation: Generation) -> Finish:
    """Return how a finished request ended. OpenAI has no finish reason for a cancelled one."""
    assert generation.finish is not None
    if generation.finish.reason is FinishReason.CANCELLED:
        raise CancelledRequestError("the request was cancelled")
    return generation.finish
