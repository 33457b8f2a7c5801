"""Errors that may cross a service boundary.

Domain code raises these; only `services.kit.rpc` and the gateway's HTTP edge know status codes.

    ServiceError               INTERNAL             500
      InvalidRequestError      INVALID_ARGUMENT     400
      UnauthenticatedError     UNAUTHENTICATED      401
      NotFoundError            NOT_FOUND            404
      ConflictError            ABORTED              409
      OverloadedError          RESOURCE_EXHAUSTED   429
      UnavailableError         UNAVAILABLE          503
      DeadlineError            DEADLINE_EXCEEDED    504

Services add classes of their own below these: `services/gateway/errors.py`,
`services/tracker/errors.py`.
"""

MAX_TEXT_BYTES = 1 << 10  # of what a caller is told; it may repeat what the caller has sent


def shortened(text: str) -> str:
    """Return a text for a caller: in gRPC it is a header."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= MAX_TEXT_BYTES:
        return text
    return encoded[: MAX_TEXT_BYTES - 3].decode(errors="ignore") + "..."


class ServiceError(Exception):
    """Base. `reason` is a stable UPPER_SNAKE_CASE identifier clients may match on."""

    reason = "INTERNAL"


class InvalidRequestError(ServiceError):
    """The request is at fault. `field` names the offending field, empty when none is."""

    reason = "INVALID_REQUEST"

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class UnauthenticatedError(ServiceError):
    """The caller has not shown its identity."""

    reason = "INVALID_API_KEY"


class NotFoundError(ServiceError):
    reason = "NOT_FOUND"


class ConflictError(ServiceError):
    """The caller's view of the state is stale: re-read, then decide."""

    reason = "CONFLICT"


class OverloadedError(ServiceError):
    """There is no room now; try again later."""

    reason = "OVERLOADED"


class UnavailableError(ServiceError):
    """A dependency is down; safe to retry with backoff."""

    reason = "UNAVAILABLE"


class DeadlineError(ServiceError):
    """The caller's deadline passed before an answer was found."""

    reason = "DEADLINE_EXCEEDED"
