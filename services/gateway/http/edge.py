"""What every HTTP request goes through: its id, one log line, a body limit, disconnects."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import structlog
from opentelemetry.trace import Span, SpanKind
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.access.api_keys import fair_key
from services.gateway.errors import BodyTooLargeError
from services.gateway.http.body_coding import check_media_type, decoded
from services.gateway.http.faults import ANTHROPIC_PATH
from services.gateway.left_out.characters import whole_characters
from services.gateway.metrics import HTTP_SECONDS
from services.kit.errors import InvalidRequestError
from services.kit.fair_turns import FairTurns
from services.kit.rpc import (
    REQUEST_ID_KEY,
    VALID_REQUEST_ID,
    bind_request_id,
    new_request_id,
)
from services.kit.telemetry.tracing import (
    NO_TRACING,
    Tracing,
    bind_parent,
    context_from,
    context_of,
    fail,
)

log = structlog.get_logger()

T = TypeVar("T")

LARGE_BODY_BYTES = 64 << 10
MAX_WHOLE_FLOAT = 2**53  # up to here each integer is a float of its own
QUIET_ROUTES = ("/health", "/ping", "/ready", "/metrics")  # probes would drown the log
# Half of a character, escaped or as bytes; an escaped pair of halves is one.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
ANTHROPIC_ID_KEY = "request-id"  # where its clients look for the id
IGNORED_PARAMETERS = "evenflow.ignored"  # of a scope: names of what a body says in vain
IGNORED_HEADER = "x-evenflow-ignored"
CLIPPED_PARAMETERS = "evenflow.clipped"  # of a scope: values that were cut, by parameter
CLIPPED_HEADER = "x-evenflow-clipped"
RETAINED = "evenflow.retained"  # of a scope: what is kept of the request's KV
RETENTION_HEADER = "x-evenflow-retention"
# What a page may read of a response, beside its body.
EXPOSED_HEADERS = (
    REQUEST_ID_KEY,
    ANTHROPIC_ID_KEY,
    IGNORED_HEADER,
    CLIPPED_HEADER,
    RETENTION_HEADER,
    "retry-after",
    "x-ratelimit-limit-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-requests",
    "x-ratelimit-reset-tokens",
    "x-should-retry",
)
CLIENT_GONE_STATUS = 499  # never sent: its client is gone


class HttpEdge:
    """Outermost ASGI layer. An exception that gets here was answered with a 500 by the app, or
    came after the first byte; it is logged.
    """

    def __init__(
        self,
        app: ASGIApp,
        tracing: Tracing = NO_TRACING,
        *,
        is_leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        """While `is_leaving` says so, each answer is the last of its connection."""
        self._app = app
        self._tracing = tracing
        self._is_leaving = is_leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = scope["path"].rstrip("/") or "/"  # for all that look at it
        claimed = Headers(scope=scope).get(REQUEST_ID_KEY, "")
        request_id = claimed if VALID_REQUEST_ID.fullmatch(claimed) else new_request_id()
        bind_request_id(request_id)
        exchange = _Exchange(request_id, scope, send, self._is_leaving)
        span = self._begin_span(scope)
        start_s = time.monotonic()
        try:
            await self._app(scope, receive, exchange.send)
        except ClientDisconnect:
            return
        except Exception:
            log.exception("http_crashed", path=scope["path"])
        finally:
            status = exchange.status or CLIENT_GONE_STATUS
            _record(scope, status, time.monotonic() - start_s)
            _end_span(span, scope, status)

    def _begin_span(self, scope: Scope) -> Span:
        """Begin the request's span, parent of those that follow; probes have none."""
        headers = Headers(scope=scope)
        tracing = NO_TRACING if scope["path"] in QUIET_ROUTES else self._tracing
        span = tracing.start(scope["method"], kind=SpanKind.SERVER, parent=context_from(headers))
        bind_parent(context_of(span))
        return span


class _Exchange:
    """Notes the status of one response, gives it its request id, and names what was
    ignored or cut."""

    def __init__(
        self, request_id: str, scope: Scope, send: Send, is_last: Callable[[], bool]
    ) -> None:
        self._request_id = request_id
        self._scope = scope
        self._send = send
        self._is_last = is_last
        self.status = 0  # 0: nothing was sent

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers[REQUEST_ID_KEY] = self._request_id
            if self._scope["path"].startswith(ANTHROPIC_PATH):
                headers[ANTHROPIC_ID_KEY] = self._request_id
            if ignored := self._scope.get(IGNORED_PARAMETERS):
                headers[IGNORED_HEADER] = ", ".join(sorted(ignored))
            if clipped := self._scope.get(CLIPPED_PARAMETERS):
                cut = (f"{name}={value}" for name, value in sorted(clipped.items()))
                headers[CLIPPED_HEADER] = ", ".join(cut)
            if retained := self._scope.get(RETAINED):
                headers[RETENTION_HEADER] = retained
            if self._is_last():
                headers["connection"] = "close"
        await self._send(message)


def _end_span(span: Span, scope: Scope, status: int) -> None:
    route = _route(scope)
    span.update_name(f"{scope['method']} {route}")
    span.set_attribute("http.request.method", scope["method"])
    span.set_attribute("http.route", route)
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        fail(span, str(status))
    span.end()


def _route(scope: Scope) -> str:
    return str(getattr(scope.get("route"), "path", "unmatched"))


def _record(scope: Scope, status: int, duration_s: float) -> None:
    route = _route(scope)
    HTTP_SECONDS.labels(route, str(status)).observe(duration_s)
    if route not in QUIET_ROUTES:
        log.info("http_served", http_route=route, http_status=status, duration_s=duration_s)


def allow_origins(app: ASGIApp, origins: str) -> ASGIApp:
    """Let pages of `origins`, separated by commas, call `app` from a browser; "*": all pages,
    empty: none.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins.split(","),
        allow_methods=("DELETE", "GET", "PATCH", "POST"),
        allow_headers=("*",),
        allow_private_network=True,  # to those same origins
        expose_headers=EXPOSED_HEADERS,
    )


async def read_body(request: Request, *, max_bytes: int) -> bytearray:
    """Return the whole body, decompressed. Raises BodyTooLargeError, UnsupportedBodyError,
    InvalidRequestError.
    """
    check_media_type(request.headers.get("content-type", ""))
    coding = ", ".join(request.headers.getlist("content-encoding"))
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise BodyTooLargeError(f"the body is larger than {max_bytes} bytes")
    body = bytearray()
    async for chunk in decoded(request.stream(), coding):
        body += chunk
        if len(body) > max_bytes:
            raise BodyTooLargeError(f"the body is larger than {max_bytes} bytes")
    return body


def decode_json(body: bytearray) -> Any:
    """Return the decoded body; half a character in it, as of an emoji cut in two, is U+FFFD.

    Raises InvalidRequestError if it is no JSON.
    """
    try:
        decoded = json.loads(body, parse_constant=_refuse_constant, parse_float=_number)
        return whole_characters(decoded) if _SURROGATE.search(body) else decoded
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {_reason(error)}") from None


def _reason(error: ValueError) -> str:
    """Return what is wrong with a text that is no JSON, and where."""
    match error:
        case json.JSONDecodeError():
            return f"{error.msg}, in line {error.lineno} at character {error.colno}"
        case UnicodeDecodeError():
            return f"byte {error.start} is not {error.encoding.upper()}"
        case NoJsonError():
            return str(error)
    return "a number has too many digits"  # the one that is left


def _number(text: str) -> float:
    """Return a number. 1.0 is the integer that it is in JSON."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) <= MAX_WHOLE_FLOAT else number


def _refuse_constant(name: str) -> None:
    """Refuse what Python's JSON has beyond JSON."""
    raise NoJsonError(f"{name} is no number")


class NoJsonError(ValueError):
    """A text is no JSON, though Python's parser takes it."""


class LargeBodies:
    """Has large bodies read off the event loop: no token goes out while one is read on it."""

    def __init__(self) -> None:
        self._turns = FairTurns()  # threads take turns with the loop: one of them is enough

    async def read(self, body: bytearray, checked: Callable[[], T]) -> T:
        """Return what `checked` makes of `body`, or raise what it raises."""
        if len(body) < LARGE_BODY_BYTES:
            return checked()
        work = partial(asyncio.to_thread, checked)
        return await self._turns.run(work, key=fair_key(), size=len(body))


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, whose request is read to its end, and cancel it when the client goes away."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.wait({working, watching})
    if not working.cancelled():
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
