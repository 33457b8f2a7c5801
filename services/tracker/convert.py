"""Protobuf <-> domain. The only tracker module besides the servicer that imports pb2.

What a field may hold is said by its type; here is what holds between fields.
"""

from google.protobuf.duration_pb2 import Duration

from evenflow.tracker.v1 import tracker_pb2 as pb
from services.kit.wire import fail, read, write
from services.tracker.types import (
    DeliveredReport,
    GatewayWriter,
    GeneratedReport,
    Lease,
    Registration,
    Registrations,
    TrackedRequest,
    TrackerSnapshot,
)


def registrations_from_proto(
    request: pb.RegisterRequest,
) -> tuple[GatewayWriter, tuple[Registration, ...]]:
    told = read(Registrations, request)
    if not told.registrations:
        fail("registrations", "needs at least one entry")
    writer = GatewayWriter(gateway_id=told.gateway_id, epoch=told.gateway_epoch)
    return writer, told.registrations


def generated_from_proto(request: pb.ReportRequest) -> GeneratedReport:
    report = read(GeneratedReport, request)
    for i, entry in enumerate(request.progress):
        if entry.executor_id != request.executor_id:
            fail(f"progress[{i}].executor_id", "must be the reporting executor")
        if entry.HasField("num_delivered_tokens"):
            fail(f"progress[{i}].num_delivered_tokens", "is for gateways only")
    return report


def delivered_from_proto(request: pb.ReportRequest) -> DeliveredReport:
    report = read(DeliveredReport, request)
    for i, entry in enumerate(request.progress):
        if entry.HasField("num_generated_tokens"):
            fail(f"progress[{i}].num_generated_tokens", "is for executors only")
        if entry.state:
            fail(f"progress[{i}].state", "is for executors only")
    return report


def lease_to_proto(lease: Lease, *, now_s: float) -> pb.Executor:
    lease_ttl = duration_to_proto(max(0.0, lease.expires_at_s - now_s))
    return write(lease.offer, pb.Executor, lease_ttl=lease_ttl)


def duration_to_proto(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def snapshot_to_proto(snapshot: TrackerSnapshot, *, now_s: float) -> pb.SnapshotResponse:
    lease = snapshot.lease
    return pb.SnapshotResponse(
        requests=[record_to_proto(record, now_s=now_s) for record in snapshot.requests],
        executor=None if lease is None else lease_to_proto(lease, now_s=now_s),
    )


def record_to_proto(record: TrackedRequest, *, now_s: float) -> pb.RequestRecord:
    return write(
        record,
        pb.RequestRecord,
        executor_id=record.key.executor_id,
        request_id=record.key.request_id,
        num_generated_tokens=record.num_generated,
        num_delivered_tokens=record.num_delivered,
        num_deposited_tokens=record.num_deposited,
        generated_age_s=_age_s(record.generated_at_s, now_s),
        delivered_age_s=_age_s(record.delivered_at_s, now_s),
        registered_age_s=_age_s(record.registered_at_s, now_s),
    )


def _age_s(at_s: float | None, now_s: float) -> float | None:
    """Return an age; never negative, though trackers' clocks differ a little."""
    return None if at_s is None else max(0.0, now_s - at_s)
