"""What the tracker is told and what it records: requests, their life cycle, and executors' leases.

Instants are wall-clock seconds since the Unix epoch, read by the store's clock.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, NewType, TypeAlias

from services.generation.lifecycle import FINAL_STATES, RequestStatus
from services.pacing.types import ServiceLevel
from services.placement.ranges import AtMost, Count, PositiveInt, Within
from services.reporting.load import ExecutorLoad

ExecutorId = NewType("ExecutorId", str)
RequestId = NewType("RequestId", str)
GatewayId = NewType("GatewayId", str)

NO_EPOCH = 0  # no process of the executor has claimed the request yet
MAX_EPOCH = 2**53 - 1  # above it Lua's numbers skip integers; reached in the year 2255
MAX_ENTRIES = 10_000  # of one call: a script holds up all of Redis while it runs
MAX_TEXT_LENGTH = 4_096
VALID_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Name:
    """A text that may be part of a Redis key's hash tag: without braces."""

    def holds(self, text: str) -> bool:
        return VALID_NAME.fullmatch(text) is not None

    def __str__(self) -> str:
        return "1 to 128 characters of A-Z, a-z, 0-9 and _.:-"


ExecutorName: TypeAlias = Annotated[ExecutorId, Name()]
GatewayName: TypeAlias = Annotated[GatewayId, Name()]
Text: TypeAlias = Annotated[str, AtMost(MAX_TEXT_LENGTH)]
Epoch: TypeAlias = Annotated[int, Within(1, MAX_EPOCH)]  # microseconds since 1970


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorRef:
    """Names one executor."""

    executor_id: ExecutorName


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RequestKey:
    """Names one request on one executor."""

    executor_id: ExecutorName
    request_id: Annotated[RequestId, AtMost(128)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOffer:
    """What an executor says of itself when it asks for a lease."""

    executor_id: ExecutorName
    epoch: Epoch  # start of its process
    address: Text  # "host:port"
    model: Text
    load: ExecutorLoad = field(default_factory=ExecutorLoad)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """An executor's right to be routed to and to report, until `expires_at_s` (exclusive)."""

    offer: ExecutorOffer
    expires_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayWriter:
    """A gateway process, the only writer of its requests' delivered counts."""

    gateway_id: GatewayName
    epoch: Epoch  # start of its process


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorWriter:
    """An executor process, the only writer of its requests' generated counts and states."""

    executor_id: ExecutorName
    epoch: Epoch  # as in its lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """An executor's word that it lives."""

    writer: ExecutorWriter
    load: ExecutorLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What is known of a request when it is routed."""

    key: RequestKey
    generation: PositiveInt  # how often it was routed
    num_prompt_tokens: PositiveInt
    service_level: ServiceLevel = field(default_factory=ServiceLevel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registrations:
    """Requests that a gateway routed."""

    gateway_id: GatewayName
    gateway_epoch: Epoch  # start of its process
    registrations: Annotated[tuple[Registration, ...], AtMost(MAX_ENTRIES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedProgress:
    """Absolute progress that an executor reports. None: not reported."""

    request_id: Annotated[RequestId, AtMost(128)]
    generation: PositiveInt
    num_generated_tokens: Count | None = None
    state: RequestStatus | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredProgress:
    """Absolute progress that a gateway reports. None: not reported."""

    key: RequestKey
    generation: PositiveInt
    num_delivered_tokens: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedReport:
    """What an executor's requests have come to."""

    writer: ExecutorWriter
    progress: Annotated[tuple[GeneratedProgress, ...], AtMost(MAX_ENTRIES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredReport:
    """What a gateway's readers have come to."""

    writer: GatewayWriter
    progress: Annotated[tuple[DeliveredProgress, ...], AtMost(MAX_ENTRIES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportResult:
    """Which entries were not applied, in the order of the report."""

    unknown: tuple[RequestKey, ...] = ()  # not recorded, or only an older generation is
    stale: tuple[RequestKey, ...] = ()  # a newer generation or process owns them
    illegal: tuple[RequestKey, ...] = ()  # no path to the reported state; counts were applied


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRequest:
    """All that is recorded of one request."""

    key: RequestKey
    generation: int
    gateway_id: GatewayId
    gateway_epoch: int
    executor_epoch: int  # NO_EPOCH until an executor process is known to own it
    state: RequestStatus
    num_prompt_tokens: int
    service_level: ServiceLevel
    registered_at_s: float
    expires_at_s: float  # forgotten from here on, unless reported again
    num_generated: int = 0
    num_delivered: int = 0
    generated_at_s: float | None = None  # when `num_generated` last grew; None: never reported
    delivered_at_s: float | None = None  # when `num_delivered` last grew; None: never reported

    @property
    def num_deposited(self) -> int:
        """Return the tokens that wait for their reader."""
        return max(0, self.num_generated - self.num_delivered)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerSnapshot:
    """Requests of one executor, sorted by id, and its lease if it holds one."""

    requests: tuple[TrackedRequest, ...]
    lease: Lease | None

    @classmethod
    def of(cls, requests: Iterable[TrackedRequest], lease: Lease | None) -> "TrackerSnapshot":
        """Leave out what earlier processes of the executor had, if one of it holds the lease."""
        if lease is not None:
            owners = (NO_EPOCH, lease.offer.epoch)
            requests = [one for one in requests if one.executor_epoch in owners]
        return cls(requests=tuple(sorted(requests, key=lambda one: one.key)), lease=lease)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """How long records hold. Seconds."""

    lease_ttl_s: float = 5.0  # of a lease, from its last renewal
    request_ttl_s: float = 60.0  # of a live request, from its last registration or report
    retention_s: float = 600.0  # of an ended request, from its last report

    def request_s(self, state: RequestStatus) -> float:
        return self.retention_s if state in FINAL_STATES else self.request_ttl_s
