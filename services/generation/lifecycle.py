"""The life of a request: its states, and every way from one to another."""

from enum import Enum


class RequestStatus(Enum):
    """Where a request is in its life."""

    QUEUED = "queued"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in FINAL_STATES


FINAL_STATES = frozenset({RequestStatus.FINISHED, RequestStatus.FAILED, RequestStatus.CANCELLED})

# The state machine: every edge there is. A state leads to all behind it: a report may have missed
# those between.
EDGES: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.QUEUED: frozenset({RequestStatus.DECODING, *FINAL_STATES}),
    RequestStatus.DECODING: FINAL_STATES,
    RequestStatus.FINISHED: frozenset(),
    RequestStatus.FAILED: frozenset(),
    RequestStatus.CANCELLED: frozenset(),
}
