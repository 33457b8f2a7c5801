"""HTTP responses that generate: an answer as a whole, or as server-sent events."""

from abc import abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from services.gateway import openai_errors
from services.gateway.dispatcher import Dispatcher
from services.gateway.errors import CancelledRequestError
from services.gateway.generation import Generation
from services.gateway.http_edge import while_connected
from services.gateway.openai_responses import (
    AnswerHead,
    ChunkWriter,
    encode_json,
    event,
    whole_answer,
)
from services.gateway.types import Finish, FinishReason, GenerationRequest
from services.kit.errors import ServiceError

log = structlog.get_logger()

_EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not hold tokens back
]


class _Answer(Response):
    """Generates while it is sent. Errors before the first byte are raised to the app's handlers;
    when the client goes away the request is aborted.
    """

    def __init__(
        self, dispatcher: Dispatcher, request: GenerationRequest, head: AnswerHead
    ) -> None:
        super().__init__()
        self._dispatcher = dispatcher
        self._request = request
        self._head = head

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._run(scope, receive, send))

    @abstractmethod
    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class WholeAnswer(_Answer):
    """One JSON body at the end. A token counts as delivered when it is taken for the body, so
    that the scheduler sees no deposit where nobody reads.
    """

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        texts: list[str] = []
        async with self._dispatcher.generate(self._request) as generation:
            async for tokens in generation.batches():
                texts.extend(token.text for token in tokens)
            finish = _uncancelled(generation)
        body = encode_json(whole_answer(self._head, "".join(texts), finish))
        await Response(body, media_type="application/json")(scope, receive, send)


class StreamedAnswer(_Answer):
    """One event per token. After the status is sent, an error is the last event."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        request: GenerationRequest,
        head: AnswerHead,
        *,
        includes_usage: bool,
    ) -> None:
        super().__init__(dispatcher, request, head)
        self._chunks = ChunkWriter(head, includes_usage=includes_usage)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._dispatcher.generate(self._request) as generation:
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": list(_EVENT_STREAM_HEADERS),
                }
            )
            async with aclosing(self._events(generation)) as all_events:
                async for events in all_events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, generation: Generation) -> AsyncGenerator[bytes]:
        try:
            async for tokens in generation.batches():
                if events := self._chunks.tokens(tokens):
                    yield events
            yield self._chunks.ending(_uncancelled(generation))
        except ServiceError as error:
            log.info("stream_failed", error_reason=error.reason, detail=str(error))
            yield event(openai_errors.body_of(error))
        except Exception as error:
            log.exception("stream_crashed")
            yield event(openai_errors.body_of(error))


def _uncancelled(generation: Generation) -> Finish:
    """Return how a finished request ended. OpenAI has no finish reason for a cancelled one."""
    assert generation.finish is not None
    if generation.finish.reason is FinishReason.CANCELLED:
        raise CancelledRequestError("the request was cancelled")
    return generation.finish


def error_response(error: Exception) -> JSONResponse:
    """Return the response for an error before the first byte."""
    status = openai_errors.http_status(error)
    return JSONResponse(
        openai_errors.body_of(error),
        status_code=status,
        headers=openai_errors.retry_headers(error),
    )
