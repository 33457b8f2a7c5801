"""Failed responses, in the shape of the API whose path was called."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from starlette.responses import JSONResponse

from services.gateway.anthropic import errors as anthropic_errors
from services.gateway.errors import (
    BodyTooLargeError,
    CancelledRequestError,
    HostNotAllowedError,
    StreamGoneError,
    TooManyRequestsError,
    UnknownModelError,
    UnsupportedBodyError,
)
from services.gateway.openai import errors as openai_errors
from services.kit.errors import (
    DeadlineError,
    InvalidRequestError,
    UnauthenticatedError,
    UnavailableError,
)
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


# By status: what it means, and an example.
FAULTS: Mapping[int, tuple[str, Exception]] = MappingProxyType(
    {
        400: (
            "A parameter or header is at fault, the body is no JSON, or the request no HTTP.",
            InvalidRequestError("model: required", field="model"),
        ),
        401: (
            "No good API key, where keys are asked for.",
            UnauthenticatedError("an API key is required"),
        ),
        403: (
            "The gateway is not to be called by that name, or not for that by this API key.",
            HostNotAllowedError(),
        ),
        404: ("Unknown model.", UnknownModelError("no-such-model")),
        409: ("The request was cancelled.", CancelledRequestError("the request was cancelled")),
        410: ("The stream is not kept any more.", StreamGoneError("9f2c4e")),
        413: (
            "The body is too large.",
            BodyTooLargeError("the body is larger than 1048576 bytes"),
        ),
        415: (
            "The body is not called JSON, or compressed in a way that is not read.",
            UnsupportedBodyError("content-type: must be application/json"),
        ),
        429: (
            "There is no room now, or an API key's limit is used up.",
            TooManyRequestsError(limit=1_024, num_free=0),
        ),
        500: ("The gateway or the engine failed.", RuntimeError()),
        503: (
            "No executor is connected, or it is lost; no keys are known yet; or there are too "
            "many connections.",
            UnavailableError("no executor is connected"),
        ),
        504: (
            "No executor answered in time.",
            DeadlineError("the executor did not answer in time"),
        ),
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
