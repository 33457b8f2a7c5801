"""Failed responses, in the shape of the API whose path was called."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from starlette.responses import JSONResponse

from services.gateway.anthropic import errors as anthropic_errors
from services.gateway.errors import UnsupportedBodyError
from services.gateway.openai import errors as openai_errors
from services.kit.errors import UnauthenticatedError
from services.kit.rpc import current_request_id

ANTHROPIC_PATH = "/v1/messages"  # and those under it
READABLE = MappingProxyType({"accept": "application/json", "accept-encoding": "gzip, deflate"})

# What checks call by chat's names, and executors, in the names of another API.
_NAMES_IN_MESSAGES = {
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "/v1/responses": {
            "max_tokens": "max_output_tokens",
            "messages": "input",
            "reasoning_effort": "reasoning.effort",
            "response_format": "text.format",
        },
        "/v1/messages": _NAMES_IN_MESSAGES,
        "/v1/messages/count_tokens": _NAMES_IN_MESSAGES,
    }
)


def error_response(error: Exception, path: str) -> JSONResponse:
    """Return the response for an error before the first byte."""
    headers = openai_errors.retry_headers(error)
    if isinstance(error, UnauthenticatedError):
        headers = {"www-authenticate": "Bearer"}
    if isinstance(error, UnsupportedBodyError):
        headers = dict(READABLE)
    if path.startswith(ANTHROPIC_PATH):
        body = anthropic_errors.body_of(error, current_request_id())
    else:
        body = openai_errors.body_of(error)
    _rename(body["error"], getattr(error, "field", ""), path)
    return JSONResponse(body, status_code=openai_errors.http_status(error), headers=headers)


def own_name(field: str, path: str) -> str:
    """Return the name that a parameter of chat's has in the API of `path`."""
    return _NAMES.get(path, {}).get(field, field)


def _rename(told: dict[str, Any], field: str, path: str) -> None:
    """Blame a parameter by the name that it has in the API of `path`."""
    name = own_name(field, path)
    if name == field or not told["message"].startswith(f"{field}:"):
        return
    told["message"] = name + told["message"].removeprefix(field)
    if "param" in told:
        told["param"] = name


def status_response(
    status: int, message: str, path: str, *, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return the response for what the router says itself: no such route, no such method."""
    body: dict[str, Any]
    if path.startswith(ANTHROPIC_PATH):
        body = anthropic_errors.error_body(status, message, current_request_id())
    else:
        body = openai_errors.error_body(
            status, message, code="unknown_url" if status == 404 else None
        )
    return JSONResponse(body, status_code=status, headers=headers)
