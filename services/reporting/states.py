"""A request's state on the wire."""

from evenflow.tracker.v1 import tracker_pb2 as pb
from services.generation.lifecycle import RequestStatus

TO_PROTO: "dict[RequestStatus, pb.RequestState.ValueType]" = {
    status: pb.RequestState.Value(f"REQUEST_STATE_{status.name}") for status in RequestStatus
}
FROM_PROTO = {state: status for status, state in TO_PROTO.items()}
