"""The life of a request: its states, and every way from one to another."""

from enum import Enum


class RequestStatus(Enum):
    """Where a request is in its life."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODING = "decoding"
    PAUSED = "paused"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in FINAL_STATES


FINAL_STATES = frozenset({RequestStatus.FINISHED, RequestStatus.FAILED, RequestStatus.CANCELLED})

# The state machine: every edge there is.
EDGES: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.QUEUED: frozenset({RequestStatus.PREFILL, *FINAL_STATES}),
    RequestStatus.PREFILL: frozenset({RequestStatus.DECODING, *FINAL_STATES}),
    RequestStatus.DECODING: frozenset(
        {RequestStatus.PAUSED, RequestStatus.PREEMPTED, *FINAL_STATES}
    ),
    RequestStatus.PAUSED: frozenset({RequestStatus.DECODING, *FINAL_STATES}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.DECODING, *FINAL_STATES}),
    RequestStatus.FINISHED: frozenset(),
    RequestStatus.FAILED: frozenset(),
    RequestStatus.CANCELLED: frozenset(),
}


def _reachable(start: RequestStatus) -> frozenset[RequestStatus]:
    seen: set[RequestStatus] = set()
    frontier = set(EDGES[start])
    while frontier:
        seen |= frontier
        frontier = {target for state in frontier for target in EDGES[state]} - seen
    return frozenset(seen)


# Where a request can get to by one edge or more.
REACHABLE = {state: _reachable(state) for state in RequestStatus}
