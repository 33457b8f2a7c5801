"""Service errors as OpenAI clients expect them: status, headers and body."""

from types import MappingProxyType
from typing import Any

from services.gateway.errors import (
    AdminKeyNeededError,
    BodyTooLargeError,
    CancelledRequestError,
    HostNotAllowedError,
    KeyLimitError,
    StreamGoneError,
    TooManyRequestsError,
    UnsupportedBodyError,
)
from services.kit import errors

_STATUS_BY_ERROR = MappingProxyType(
    {
        AdminKeyNeededError: 403,
        BodyTooLargeError: 413,
        HostNotAllowedError: 403,
        StreamGoneError: 410,
        UnsupportedBodyError: 415,
        errors.InvalidRequestError: 400,
        errors.UnauthenticatedError: 401,
        errors.NotFoundError: 404,
        errors.ConflictError: 409,
        errors.OverloadedError: 429,
        errors.UnavailableError: 503,
        errors.DeadlineError: 504,
    }
)
_TYPE_BY_STATUS = MappingProxyType(
    {
        409: "conflict_error",
        429: "rate_limit_error",
        500: "server_error",
        503: "service_unavailable_error",
        504: "timeout_error",
    }
)
_RETRY_AFTER_S = MappingProxyType({429: "1", 503: "1"})
INTERNAL_MESSAGE = "internal error; see server log"


def http_status(error: Exception) -> int:
    """Return the status of a service error; 500 for any other."""
    for cls in type(error).__mro__:
        if cls in _STATUS_BY_ERROR:
            return _STATUS_BY_ERROR[cls]
    return 500


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the body of every failed response; clients tell cases apart by `code`."""
    kind = _TYPE_BY_STATUS.get(status, "invalid_request_error")
    message, param = errors.shortened(message), param and errors.shortened(param)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: Exception) -> dict[str, Any]:
    """Return the body for `error`; what is not a service error keeps its details to the log."""
    if not isinstance(error, errors.ServiceError):
        return error_body(500, INTERNAL_MESSAGE, code="internal")
    return error_body(
        http_status(error),
        str(error),
        param=getattr(error, "field", "") or None,
        code=error.reason.lower(),
    )


def retry_headers(error: Exception) -> dict[str, str]:
    """Return what tells a client whether and when to try again."""
    if isinstance(error, CancelledRequestError):
        return {"x-should-retry": "false"}  # OpenAI's SDKs repeat a 409 otherwise
    if isinstance(error, KeyLimitError):
        return {"retry-after": str(error.retry_after_s), **error.headers}
    retry_after_s = _RETRY_AFTER_S.get(http_status(error))
    if retry_after_s is None:
        return {}
    headers = {"retry-after": retry_after_s}
    if isinstance(error, TooManyRequestsError):
        headers |= {
            "x-ratelimit-limit-requests": str(error.limit),
            "x-ratelimit-remaining-requests": str(error.num_free),
            "x-ratelimit-reset-requests": f"{retry_after_s}s",
        }
    return headers
