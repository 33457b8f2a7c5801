"""Where the executor tells how far its requests have come."""

from enum import Enum
from typing import Protocol


class Phase(Enum):
    """Where a request is in its life, as far as the front can see."""

    QUEUED = "queued"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (Phase.FINISHED, Phase.FAILED, Phase.CANCELLED)


class ProgressSink(Protocol):
    """Takes absolute counts. Never blocks and never raises."""

    def note(
        self, request_id: str, *, generation: int, num_generated: int, phase: Phase
    ) -> None: ...


class NoProgress:
    """Tells nobody."""

    def note(self, request_id: str, *, generation: int, num_generated: int, phase: Phase) -> None:
        """Do nothing."""
