"""Errors as Anthropic's clients expect them; their statuses and headers are those of OpenAI's."""

from types import MappingProxyType
from typing import Any

from services.gateway.errors import ContextLengthError
from services.gateway.openai import errors as openai_errors

_TYPE_BY_STATUS = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        409: "conflict_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)


def error_body(status: int, message: str, request_id: str) -> dict[str, Any]:
    """Return the body of a failed response."""
    kind = _TYPE_BY_STATUS.get(status, "invalid_request_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


def _too_long(error: ContextLengthError) -> str:
    """Say so in the words by which clients know that they are to compact a conversation."""
    most = error.max_model_len
    counted = str(error.num_tokens) if error.num_tokens else f"more than {most}"
    return f"prompt is too long: {counted} tokens > {most} maximum"


def body_of(error: Exception, request_id: str) -> dict[str, Any]:
    """Return the body for `error`; what is not a service error keeps its details to the log."""
    message = openai_errors.body_of(error)["error"]["message"]
    if isinstance(error, ContextLengthError) and error.max_model_len:
        message = _too_long(error)
    return error_body(openai_errors.http_status(error), message, request_id)
