"""Where the executor tells how far its requests have come."""

from typing import Protocol

from services.executor.types import Delta, Failure
from services.generation.finish import FinishReason
from services.generation.lifecycle import RequestStatus


class ProgressSink(Protocol):
    """Takes absolute counts. Never blocks and never raises."""

    def note(
        self, request_id: str, *, generation: int, num_generated: int, status: RequestStatus
    ) -> None: ...


class NoProgress:
    """Tells no client."""

    def note(
        self, request_id: str, *, generation: int, num_generated: int, status: RequestStatus
    ) -> None:
        """Do nothing."""


def status_after(delta: Delta, num_generated: int) -> RequestStatus:
    """Return where a request is after a step."""
    match delta.ending:
        case None:
            return RequestStatus.DECODING if num_generated else RequestStatus.QUEUED
        case Failure():
            return RequestStatus.FAILED
        case FinishReason.CANCELLED:
            return RequestStatus.CANCELLED
        case _:
            return RequestStatus.FINISHED
