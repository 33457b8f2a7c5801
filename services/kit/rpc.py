"""The gRPC edge shared by every service: errors, request ids, deadlines, channels."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from contextvars import ContextVar
from secrets import token_hex
from typing import Any, TypeAlias, cast
from uuid import uuid4

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc import aio

from services.kit import errors
from services.kit.renewed_channel import RenewedChannel
from services.kit.telemetry.metrics import RPC_ERRORS, RPC_SECONDS
from services.kit.tls import channel_credentials
from services.kit.transport import PLAIN, Transport

log = structlog.get_logger()

Context: TypeAlias = aio.ServicerContext[Any, Any]

REQUEST_ID_KEY = "x-request-id"
VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
MAX_NAME_LENGTH = 111  # leaves room for a colon and 16 digits
RECONNECT_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
QUIET_METHODS = ("/grpc.health.v1.", "/grpc.reflection.")  # probes would drown the log

STATUS_BY_ERROR: dict[type[errors.ServiceError], grpc.StatusCode] = {
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.ConflictError: grpc.StatusCode.ABORTED,
    errors.OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
}
ERROR_BY_STATUS = {status: error for error, status in STATUS_BY_ERROR.items()}

_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)  # monotonic seconds
_request_id: ContextVar[str] = ContextVar("request_id", default="")


def new_request_id() -> str:
    return f"req-{uuid4().hex}"


def own_request_id(name: str) -> str:
    """Return an id that no other request has, for one that its client calls `name`; valid too."""
    return f"{name[:MAX_NAME_LENGTH]}:{token_hex(8)}"


def name_of_request(own_id: str) -> str:
    """Return what the client calls the request with this id of `own_request_id`."""
    return own_id.rpartition(":")[0] or own_id


def status_for(error: errors.ServiceError) -> grpc.StatusCode:
    for cls in type(error).__mro__:
        if cls in STATUS_BY_ERROR:
            return STATUS_BY_ERROR[cls]
    return grpc.StatusCode.INTERNAL


@contextmanager
def service_errors() -> Iterator[None]:
    """Re-raise the gRPC errors of a client call as service errors, reason kept."""
    try:
        yield
    except aio.AioRpcError as failure:
        cls = ERROR_BY_STATUS.get(failure.code(), errors.ServiceError)
        error = cls(failure.details() or failure.code().name)
        error.reason = str(dict(failure.trailing_metadata() or ()).get("error-reason", cls.reason))
        raise error from failure


def bind_request_id(request_id: str) -> None:
    """Make `request_id` part of this task's log lines and outgoing calls."""
    _request_id.set(request_id)
    structlog.contextvars.bind_contextvars(request_id=request_id)


def current_request_id() -> str:
    """Return the request id of this task; empty outside of a request."""
    return _request_id.get()


def timeout_s(cap_s: float) -> float:
    """Return how long an outgoing call may take: `cap_s`, cut to the incoming deadline."""
    deadline = _deadline.get()
    return cap_s if deadline is None else max(0.0, min(cap_s, deadline - time.monotonic()))


def _enter_call(context: Context) -> None:
    """Take request id and deadline of the incoming call into this task's context."""
    metadata = dict(context.invocation_metadata() or ())
    claimed = str(metadata.get(REQUEST_ID_KEY, ""))
    bind_request_id(claimed if VALID_REQUEST_ID.fullmatch(claimed) else new_request_id())
    remaining_s = context.time_remaining()
    _deadline.set(None if remaining_s is None else time.monotonic() + remaining_s)


async def fail(context: Context, error: errors.ServiceError) -> None:
    """End a call with the status of `error`."""
    await _fail(context, status_for(error), str(error), error.reason)


async def _fail(context: Context, status: grpc.StatusCode, message: str, reason: str) -> None:
    RPC_ERRORS.labels(reason).inc()
    await context.abort(status, errors.shortened(message), (("error-reason", reason),))


class LiveCalls:
    """How many RPCs of a server are being served, health and reflection left out."""

    def __init__(self) -> None:
        self._num_live = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        self._num_live += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_live -= 1
            if not self._num_live:
                self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()


@asynccontextmanager
async def _served(method: str, context: Context, *, routine: bool) -> AsyncIterator[None]:
    """Map exceptions to statuses; write the call's one metric and log line, at debug level for
    `routine` calls that went well: reports and renewals come many times a second.
    """
    _enter_call(context)
    start = time.monotonic()
    code = "OK"
    try:
        yield
    except (aio.AbortError, aio.BaseError):
        code = str(getattr(context.code(), "name", context.code()))
        raise
    except errors.ServiceError as error:
        status = status_for(error)
        code = status.name
        await _fail(context, status, str(error), error.reason)
    except Exception:
        code = grpc.StatusCode.INTERNAL.name
        log.exception("rpc_crashed", rpc_method=method)
        await _fail(context, grpc.StatusCode.INTERNAL, "internal error; see server log", "INTERNAL")
    except BaseException:
        code = grpc.StatusCode.CANCELLED.name
        raise
    finally:
        duration_s = time.monotonic() - start
        RPC_SECONDS.labels(method, code).observe(duration_s)
        level = logging.DEBUG if routine and code == "OK" else logging.INFO
        log.log(level, "rpc_served", rpc_method=method, rpc_status=code, duration_s=duration_s)


class ServiceInterceptor(aio.ServerInterceptor):
    """Gives every RPC its request id and deadline, and turns exceptions into gRPC statuses.

    Servicers raise `ServiceError`s and hold no try/except; response streams are async generators.
    """

    def __init__(self, *, client_names: frozenset[str] = frozenset()) -> None:
        """With `client_names`, callers must show a certificate with one of them."""
        self.live_calls = LiveCalls()
        self._client_names = client_names

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(QUIET_METHODS):
            return handler
        codec = (handler.request_deserializer, handler.response_serializer)
        if handler.request_deserializer and not handler.request_streaming:
            codec = (_forgiving(handler.request_deserializer), handler.response_serializer)
        if handler.unary_unary:
            served = self._unary(method, handler.unary_unary)
            return grpc.unary_unary_rpc_method_handler(served, *codec)
        if handler.unary_stream:
            streamed = self._streaming(method, handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(streamed, *codec)
        if handler.stream_unary:
            served = self._unary(method, handler.stream_unary)
            return grpc.stream_unary_rpc_method_handler(served, *codec)
        streamed = self._streaming(method, handler.stream_stream)
        return grpc.stream_stream_rpc_method_handler(streamed, *codec)

    def _unary(
        self, method: str, behavior: Callable[..., Awaitable[Any]]
    ) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: Context) -> Any:
            with self.live_calls.one_more():
                async with _served(method, context, routine=True):
                    _check_client(context, self._client_names)
                    return await behavior(_decoded(request), context)

        return call

    def _streaming(
        self, method: str, behavior: Callable[..., AsyncGenerator[Any, None]]
    ) -> Callable[..., AsyncIterator[Any]]:
        async def call(request: Any, context: Context) -> AsyncIterator[Any]:
            with self.live_calls.one_more():
                async with _served(method, context, routine=False):
                    _check_client(context, self._client_names)
                    async with aclosing(behavior(_decoded(request), context)) as responses:
                        async for response in responses:
                            yield response

        return call


def _check_client(context: Context, names: frozenset[str]) -> None:
    """Raise UnauthenticatedError for a client whose certificate bears none of `names`, if any."""
    if not names:
        return
    borne = context.auth_context().get("x509_subject_alternative_name", ())
    if names.isdisjoint(name.decode(errors="replace") for name in borne):
        raise errors.UnauthenticatedError("the client's certificate is of no service that may call")


class _Undecodable:
    """Stands for a message that is none, until the call has begun and can be refused."""


def _forgiving(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Leave what cannot be decoded to `_decoded`: gRPC itself would call it an unknown error."""

    def deserialize(message: bytes) -> Any:
        try:
            return deserializer(message)
        except DecodeError:
            return _Undecodable()

    return deserialize


def _decoded(request: Any) -> Any:
    """Return the request. Raises InvalidRequestError if it could not be decoded."""
    if isinstance(request, _Undecodable):
        raise errors.InvalidRequestError("the message cannot be decoded")
    return request


class OutgoingInterceptor(aio.UnaryUnaryClientInterceptor):
    """Passes the request id on, and gives every unary call a timeout cut from the deadline."""

    def __init__(self, default_timeout_s: float) -> None:
        self._default_timeout_s = default_timeout_s

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: aio.ClientCallDetails, request: Any
    ) -> Any:
        cap_s = client_call_details.timeout or self._default_timeout_s
        metadata = aio.Metadata(*(client_call_details.metadata or ()))
        if current_request_id() and metadata.get(REQUEST_ID_KEY) is None:
            metadata.add(REQUEST_ID_KEY, current_request_id())
        details = client_call_details._replace(timeout=timeout_s(cap_s), metadata=metadata)
        return await continuation(details, request)


def make_channel(
    address: str, *, transport: Transport = PLAIN, default_timeout_s: float = 5.0
) -> aio.Channel:
    """Open a channel that reconnects within 2 s of the peer's return; calls show the certificates
    that the files hold when they begin.
    """
    interceptors = [OutgoingInterceptor(default_timeout_s)]
    options: list[tuple[str, Any]] = [*RECONNECT_OPTIONS, *transport.ping_options]
    if transport.server_name:
        options.append(("grpc.ssl_target_name_override", transport.server_name))
    if transport.certificates is None:
        return aio.insecure_channel(address, interceptors=interceptors, options=options)
    certificates = transport.certificates

    def secure_channel() -> aio.Channel:
        credentials = channel_credentials(certificates)
        return aio.secure_channel(address, credentials, interceptors=interceptors, options=options)

    return cast(aio.Channel, RenewedChannel(certificates, secure_channel))


def make_blocking_channel(
    address: str, *, transport: Transport = PLAIN, options: Sequence[tuple[str, Any]] = ()
) -> grpc.Channel:
    """Open a channel like `make_channel`'s for callers without an event loop.

    `options` come last, so that they win.
    """
    options = [*dict([*RECONNECT_OPTIONS, *transport.ping_options, *options]).items()]
    if transport.certificates is None:
        return grpc.insecure_channel(address, options=options)
    certificates = transport.certificates

    def secure_channel() -> grpc.Channel:
        return grpc.secure_channel(address, channel_credentials(certificates), options=options)

    return cast(grpc.Channel, RenewedChannel(certificates, secure_channel))
