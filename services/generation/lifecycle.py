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
        return self in _ENDS


_ENDS = (RequestStatus.FINISHED, RequestStatus.FAILED, RequestStatus.CANCELLED)

# The state machine: every edge there is.
EDGES: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.QUEUED: frozenset({RequestStatus.PREFILL, *_ENDS}),
    RequestStatus.PREFILL: frozenset({RequestStatus.DECODING, *_ENDS}),
    RequestStatus.DECODING: frozenset({RequestStatus.PAUSED, RequestStatus.PREEMPTED, *_ENDS}),
    RequestStatus.PAUSED: frozenset({RequestStatus.DECODING, *_ENDS}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.DECODING, *_ENDS}),
    RequestStatus.FINISHED: frozenset(),
    RequestStatus.FAILED: frozenset(),
    RequestStatus.CANCELLED: frozenset(),
}

FINAL_STATES = frozenset(state for state, targets in EDGES.items() if not targets)


def _reachable(start: RequestStatus) -> frozenset[RequestStatus]:
    seen: set[RequestStatus] = set()
    frontier = set(EDGES[start])
    while frontier:
        seen |= frontier
        frontier = {target for state in frontier for target in EDGES[state]} - seen
    return frozenset(seen)


# Where a request can get to by one edge or more.
REACHABLE = {state: _reachable(state) for state in RequestStatus}
