"""Where the executor tells how far its requests have come."""

from typing import Protocol

from services.generation.lifecycle import RequestStatus


class ProgressSink(Protocol):
    """Takes absolute counts. Never blocks and never raises."""

    def note(
        self, request_id: str, *, generation: int, num_generated: int, status: RequestStatus
    ) -> None: ...


class NoProgress:
    """Tells nobody."""

    def note(
        self, request_id: str, *, generation: int, num_generated: int, status: RequestStatus
    ) -> None:
        """Do nothing."""
