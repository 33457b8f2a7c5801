"""Protobuf <-> domain. The only tracker module besides the servicer that imports pb2.

Every field is checked here; errors name the field as a path in the request.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NoReturn

from google.protobuf.duration_pb2 import Duration

from evenflow.tracker.v1 import tracker_pb2 as pb
from services.generation.lifecycle import RequestStatus
from services.generation.service_level_proto import service_level_from_proto, service_level_to_proto
from services.kit.errors import InvalidRequestError
from services.kit.wire import write
from services.reporting.states import FROM_PROTO, TO_PROTO
from services.tracker.types import (
    DeliveredProgress,
    ExecutorId,
    ExecutorLoad,
    ExecutorOffer,
    ExecutorWriter,
    GatewayId,
    GatewayWriter,
    GeneratedProgress,
    Lease,
    Registration,
    ReportResult,
    RequestId,
    RequestKey,
    RequestRecord,
    Snapshot,
)

NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")  # part of a Redis key's hash tag: no braces
MAX_REQUEST_ID_LENGTH = 128
MAX_ENTRIES = 10_000  # of one call: a script holds up all of Redis while it runs
MAX_EPOCH = 2**53  # above it Lua's numbers skip integers; reached in the year 2255


def executor_id_from_proto(value: str, field: str = "executor_id") -> ExecutorId:
    return ExecutorId(_name(value, field))


def executor_writer_from_proto(executor_id: str, epoch: int) -> ExecutorWriter:
    return ExecutorWriter(
        executor_id=executor_id_from_proto(executor_id), epoch=_epoch(epoch, "epoch")
    )


def gateway_writer_from_proto(gateway_id: str, epoch: int, *, epoch_field: str) -> GatewayWriter:
    return GatewayWriter(
        gateway_id=GatewayId(_name(gateway_id, "gateway_id")), epoch=_epoch(epoch, epoch_field)
    )


def offer_from_proto(request: pb.RegisterExecutorRequest) -> ExecutorOffer:
    if not request.address:
        _refuse("address", "is required")
    if not request.model:
        _refuse("model", "is required")
    return ExecutorOffer(
        executor_id=executor_id_from_proto(request.executor_id),
        epoch=_epoch(request.epoch, "epoch"),
        address=request.address,
        model=request.model,
        load=_load(request.load),
    )


def required_load_from_proto(request: pb.RenewLeaseRequest) -> ExecutorLoad:
    if not request.HasField("load"):
        _refuse("load", "is required")
    return _load(request.load)


def registrations_from_proto(entries: Sequence[pb.Registration]) -> list[Registration]:
    _check_size(entries, "registrations")
    registrations = [_registration(entry, f"registrations[{i}]") for i, entry in enumerate(entries)]
    if not registrations:
        _refuse("registrations", "needs at least one entry")
    return registrations


def generated_from_proto(request: pb.ReportRequest) -> list[GeneratedProgress]:
    _check_size(request.progress, "progress")
    return [
        _generated(entry, request.executor_id, f"progress[{i}]")
        for i, entry in enumerate(request.progress)
    ]


def delivered_from_proto(request: pb.ReportRequest) -> list[DeliveredProgress]:
    _check_size(request.progress, "progress")
    return [_delivered(entry, f"progress[{i}]") for i, entry in enumerate(request.progress)]


def keys_to_proto(keys: Iterable[RequestKey]) -> list[pb.RequestKey]:
    return [write(key, pb.RequestKey()) for key in keys]


def report_result_to_proto(result: ReportResult) -> pb.ReportResponse:
    return write(result, pb.ReportResponse())


def duration_to_proto(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def lease_to_proto(lease: Lease, *, now_s: float) -> pb.Executor:
    return pb.Executor(
        executor_id=lease.offer.executor_id,
        epoch=lease.offer.epoch,
        address=lease.offer.address,
        model=lease.offer.model,
        load=write(lease.offer.load, pb.ExecutorLoad()),
        lease_ttl=duration_to_proto(max(0.0, lease.expires_at_s - now_s)),
    )


def snapshot_to_proto(snapshot: Snapshot, *, now_s: float) -> pb.SnapshotResponse:
    lease = snapshot.lease
    return pb.SnapshotResponse(
        requests=[record_to_proto(record, now_s=now_s) for record in snapshot.requests],
        executor=None if lease is None else lease_to_proto(lease, now_s=now_s),
    )


def record_to_proto(record: RequestRecord, *, now_s: float) -> pb.RequestRecord:
    return pb.RequestRecord(
        executor_id=record.key.executor_id,
        request_id=record.key.request_id,
        generation=record.generation,
        gateway_id=record.gateway_id,
        state=TO_PROTO[record.state],
        num_prompt_tokens=record.num_prompt_tokens,
        num_generated_tokens=record.num_generated,
        num_delivered_tokens=record.num_delivered,
        num_deposited_tokens=record.num_deposited,
        generated_age_s=_age_s(record.generated_at_s, now_s),
        delivered_age_s=_age_s(record.delivered_at_s, now_s),
        registered_age_s=max(0.0, now_s - record.registered_at_s),
        service_level=service_level_to_proto(record.service_level),
    )


def _age_s(at_s: float | None, now_s: float) -> float | None:
    """Return an age; never negative, though trackers' clocks differ a little."""
    return None if at_s is None else max(0.0, now_s - at_s)


def _refuse(field: str, problem: str) -> NoReturn:
    raise InvalidRequestError(f"{field}: {problem}", field=field)


def _check_size(entries: Sequence[object], field: str) -> None:
    if len(entries) > MAX_ENTRIES:
        _refuse(field, f"has more than {MAX_ENTRIES} entries")


def _name(value: str, field: str) -> str:
    if not value:
        _refuse(field, "is required")
    if not NAME.fullmatch(value):
        _refuse(field, "needs 1 to 128 characters of A-Z, a-z, 0-9 and _.:-")
    return value


def _epoch(value: int, field: str) -> int:
    if not 0 < value < MAX_EPOCH:
        _refuse(field, "is required, > 0, in microseconds since 1970")
    return value


def _at_least(low: int, value: int, field: str) -> int:
    if value < low:
        _refuse(field, f"must be at least {low}")
    return value


def _request_id(value: str, field: str) -> RequestId:
    if not 1 <= len(value) <= MAX_REQUEST_ID_LENGTH:
        _refuse(field, f"needs 1 to {MAX_REQUEST_ID_LENGTH} characters")
    return RequestId(value)


def _state(value: "pb.RequestState.ValueType", field: str) -> RequestStatus:
    state = FROM_PROTO.get(value)
    if state is None:
        _refuse(field, f"unknown value {value}")
    return state


def _load(load: pb.ExecutorLoad) -> ExecutorLoad:
    if not 0.0 <= load.kv_cache_usage_frac <= 1.0:
        _refuse("load.kv_cache_usage_frac", "must be in [0, 1]")
    return ExecutorLoad(
        num_running_reqs=_at_least(0, load.num_running_reqs, "load.num_running_reqs"),
        num_waiting_reqs=_at_least(0, load.num_waiting_reqs, "load.num_waiting_reqs"),
        kv_cache_usage_frac=load.kv_cache_usage_frac,
    )


def _key(entry: pb.Registration | pb.Progress, path: str) -> RequestKey:
    return RequestKey(
        executor_id=executor_id_from_proto(entry.executor_id, f"{path}.executor_id"),
        request_id=_request_id(entry.request_id, f"{path}.request_id"),
    )


def _registration(entry: pb.Registration, path: str) -> Registration:
    return Registration(
        key=_key(entry, path),
        generation=_at_least(1, entry.generation, f"{path}.generation"),
        num_prompt_tokens=_at_least(1, entry.num_prompt_tokens, f"{path}.num_prompt_tokens"),
        service_level=service_level_from_proto(entry.service_level, path=f"{path}.service_level"),
    )


def _generated(entry: pb.Progress, executor_id: str, path: str) -> GeneratedProgress:
    key = _key(entry, path)
    if key.executor_id != executor_id:
        _refuse(f"{path}.executor_id", "must be the reporting executor")
    if entry.HasField("num_delivered_tokens"):
        _refuse(f"{path}.num_delivered_tokens", "is for gateways only")
    return GeneratedProgress(
        request_id=key.request_id,
        generation=_at_least(1, entry.generation, f"{path}.generation"),
        num_generated=_at_least(0, entry.num_generated_tokens, f"{path}.num_generated_tokens")
        if entry.HasField("num_generated_tokens")
        else None,
        state=_state(entry.state, f"{path}.state") if entry.state else None,
    )


def _delivered(entry: pb.Progress, path: str) -> DeliveredProgress:
    if entry.HasField("num_generated_tokens"):
        _refuse(f"{path}.num_generated_tokens", "is for executors only")
    if entry.state:
        _refuse(f"{path}.state", "is for executors only")
    return DeliveredProgress(
        key=_key(entry, path),
        generation=_at_least(1, entry.generation, f"{path}.generation"),
        num_delivered=_at_least(0, entry.num_delivered_tokens, f"{path}.num_delivered_tokens")
        if entry.HasField("num_delivered_tokens")
        else None,
    )
