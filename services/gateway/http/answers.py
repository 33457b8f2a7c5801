"""HTTP responses that generate: answers as a whole, or as server-sent events."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from services.gateway.errors import CancelledRequestError
from services.gateway.http.edge import while_connected
from services.gateway.http.event_stream import EventStream
from services.gateway.http.protocol import BODY
from services.gateway.live.dispatcher import Dispatcher
from services.gateway.live.generation import Generation
from services.gateway.live.side_by_side import side_by_side
from services.gateway.openai import errors as openai_errors
from services.gateway.openai.responses import (
    DONE_EVENT,
    Answer,
    AnswerHead,
    ChunkWriter,
    encode_json,
    event,
    usage_event,
    whole_answers,
)
from services.gateway.types import Finish, GenerationRequest, Token
from services.generation.finish import FinishReason
from services.kit.errors import ServiceError

log = structlog.get_logger()


class _Answers(Response):
    """Generates while it is sent. Errors before the first byte are raised to the app's handlers;
    when the client goes away the requests are aborted.
    """

    def __init__(
        self, dispatcher: Dispatcher, requests: Sequence[GenerationRequest], head: AnswerHead
    ) -> None:
        super().__init__()
        self._dispatcher = dispatcher
        self._requests = requests
        self._head = head

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._run(scope, receive, send))

    @abstractmethod
    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class WholeAnswers(_Answers):
    """One JSON body at the end. A token counts as delivered when it is taken for the body, so
    that the scheduler sees no deposit where nobody reads.
    """

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._dispatcher.generate_all(self._requests) as generations:
            answers = await side_by_side([self._collected(g) for g in generations])
        body = encode_json(whole_answers(self._head, answers))
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _collected(self, generation: Generation) -> Answer:
        tokens = [token async for batch in generation.batches() for token in batch]
        generation.ending_taken()
        return Answer(
            tokens=() if self._head.is_prompt_only else tokens,
            finish=_told_finish(self._head, generation),
            prompt=generation.prompt,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    includes_usage: bool  # token counts before the end
    counts_each_event: bool = False  # an answer's own so far, in each of its events
    keepalive_s: float  # a comment after this time without an event; 0: never


class StreamedAnswers(_Answers):
    """An event per token, each answer at its own pace. After the status is sent, an error is the
    last event.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        requests: Sequence[GenerationRequest],
        head: AnswerHead,
        options: StreamOptions,
    ) -> None:
        super().__init__(dispatcher, requests, head)
        self._options = options

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._dispatcher.generate_all(self._requests) as generations:
            stream = EventStream(send, scope[BODY])
            await stream.start()
            async with stream.kept_alive(self._options.keepalive_s):
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
            return event(openai_errors.body_of(error))
        except Exception as error:
            log.exception("stream_crashed")
            return event(openai_errors.body_of(error))
        if self._options.includes_usage:
            return usage_event(self._head, finishes) + DONE_EVENT
        return DONE_EVENT

    async def _write(self, stream: EventStream, generation: Generation, index: int) -> Finish:
        chunks = ChunkWriter(
            self._head,
            index,
            includes_usage=self._options.includes_usage,
            counted_from=generation.num_prompt_tokens if self._options.counts_each_event else None,
        )
        await generation.write_to(_AnswerEvents(stream, chunks, generation))
        finish = _told_finish(self._head, generation)
        await stream.send(chunks.ending(finish))
        generation.ending_taken()
        return finish


class _AnswerEvents:
    """Turns one answer's tokens into events: the outlet of its generation."""

    def __init__(self, stream: EventStream, chunks: ChunkWriter, generation: Generation) -> None:
        self._stream = stream
        self._chunks = chunks
        self._generation = generation
        self._prompt_is_due = generation.request.echo

    @property
    def is_open(self) -> bool:
        return self._stream.body.is_open

    async def opened(self) -> None:
        await self._stream.body.opened()

    def write(self, tokens: Sequence[Token], *, as_one: bool) -> None:
        prompt = self._generation.prompt
        if self._prompt_is_due and prompt is not None:
            self._prompt_is_due = False
            self._stream.write(self._chunks.prompt(prompt))
        if events := self._chunks.tokens(tokens, as_one=as_one):
            self._stream.write(events)


def _told_finish(head: AnswerHead, generation: Generation) -> Finish:
    """Return how a finished request ended. OpenAI has no finish reason for a cancelled one."""
    assert generation.finish is not None
    if generation.finish.reason is FinishReason.CANCELLED:
        raise CancelledRequestError("the request was cancelled")
    if head.is_prompt_only:
        return replace(generation.finish, reason=FinishReason.LENGTH, num_output_tokens=0)
    return generation.finish


def error_response(error: Exception) -> JSONResponse:
    """Return the response for an error before the first byte."""
    status = openai_errors.http_status(error)
    return JSONResponse(
        openai_errors.body_of(error),
        status_code=status,
        headers=openai_errors.retry_headers(error),
    )
