"""Asks for API keys at both edges, and at HTTP's for the name that was called, before anything else
of a call is looked at.
"""

from collections.abc import Awaitable, Callable

import grpc
from grpc import aio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.access.api_keys import SCHEME, ApiKeys, bind_address, bind_caller
from services.gateway.access.hosts import ANY_HOST, Hosts
from services.gateway.errors import HostNotAllowedError
from services.gateway.http.faults import error_response
from services.gateway.http.page import is_of_page
from services.kit.errors import ServiceError
from services.kit.rpc import Context, fail

ANTHROPIC_KEY_HEADER = "x-api-key"
OPEN_PATHS = ("/", "/health", "/ping", "/ready")  # for probes
OPEN_METHODS = "/grpc.health.v1."


class HttpGuard:
    """ASGI layer that answers 401 to a call without a good key, 503 while none is known, and 403
    to one by a name that is not the gateway's.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, hosts: Hosts = ANY_HOST) -> None:
        self._app = app
        self._keys = keys
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            bind_address((scope.get("client") or ("",))[0])
            try:
                self._check(scope["path"], Headers(scope=scope))
            except ServiceError as error:
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        """Raise what is in the way of a call, or bind its caller."""
        if not self._hosts.admit(headers.get("host", "")):
            raise HostNotAllowedError
        if not is_of_page(path):
            bind_caller(self._keys.caller(*_authorizations(headers)))


def _authorizations(headers: Headers) -> list[str]:
    """Return what may show a key: OpenAI's header, and Anthropic's as if it were that."""
    keys = headers.getlist(ANTHROPIC_KEY_HEADER)
    return headers.getlist("authorization") + [f"{SCHEME} {key}" for key in keys]


class GrpcGuard(aio.ServerInterceptor):
    """Answers UNAUTHENTICATED to whoever shows no good key; health is open."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(OPEN_METHODS):
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        try:
            bind_caller(self._keys.caller(str(metadata.get("authorization", ""))))
        except ServiceError as error:
            return _refusing_handler(error)
        return handler


def _refusing_handler(error: ServiceError) -> grpc.RpcMethodHandler:
    async def refuse(request: bytes, context: Context) -> None:
        await fail(context, error)

    return grpc.unary_unary_rpc_method_handler(refuse)
