"""What the tracker records: requests, their life cycle, and executors' leases.

Instants are wall-clock seconds since the Unix epoch, read by the store's clock.
"""

from dataclasses import dataclass, field
from typing import NewType

from services.generation.lifecycle import FINAL_STATES, RequestStatus
from services.pacing.types import ServiceLevel

ExecutorId = NewType("ExecutorId", str)
RequestId = NewType("RequestId", str)
GatewayId = NewType("GatewayId", str)

NO_EPOCH = 0  # no process of the executor has claimed the request yet


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RequestKey:
    """Names one request on one executor."""

    executor_id: ExecutorId
    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorLoad:
    """Load of an executor at the moment of sending."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage_frac: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOffer:
    """What an executor says of itself when it asks for a lease."""

    executor_id: ExecutorId
    epoch: int  # start of its process, microseconds since 1970, > 0
    address: str  # "host:port"
    model: str
    load: ExecutorLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """An executor's right to be routed to and to report, until `expires_at_s` (exclusive)."""

    offer: ExecutorOffer
    expires_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayWriter:
    """A gateway process, the only writer of its requests' delivered counts."""

    gateway_id: GatewayId
    epoch: int  # start of its process, microseconds since 1970, > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorWriter:
    """An executor process, the only writer of its requests' generated counts and states."""

    executor_id: ExecutorId
    epoch: int  # as in its lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What is known of a request when it is routed."""

    key: RequestKey
    generation: int  # how often it was routed, >= 1
    num_prompt_tokens: int  # >= 1
    service_level: ServiceLevel = field(default_factory=ServiceLevel)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedProgress:
    """Absolute progress that an executor reports. None: not reported."""

    request_id: RequestId
    generation: int
    num_generated: int | None = None
    state: RequestStatus | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredProgress:
    """Absolute progress that a gateway reports. None: not reported."""

    key: RequestKey
    generation: int
    num_delivered: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportResult:
    """Which entries were not applied, in the order of the report."""

    unknown: tuple[RequestKey, ...] = ()  # not recorded, or only an older generation is
    stale: tuple[RequestKey, ...] = ()  # a newer generation or process owns them
    illegal: tuple[RequestKey, ...] = ()  # no path to the reported state; counts were applied


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
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
class Snapshot:
    """All requests of one executor, sorted by id, and its lease if it holds one."""

    requests: tuple[RequestRecord, ...]
    lease: Lease | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """How long records hold. Seconds."""

    lease_ttl_s: float = 5.0  # of a lease, from its last renewal
    request_ttl_s: float = 60.0  # of a live request, from its last registration or report
    retention_s: float = 600.0  # of an ended request, from its last report

    def request_s(self, state: RequestStatus) -> float:
        return self.retention_s if state in FINAL_STATES else self.request_ttl_s
