"""The reference store: one process's memory, same answers as Redis."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.generation.lifecycle import EDGES, RequestStatus
from services.kit.clock import Clock
from services.reporting.load import ExecutorLoad
from services.tracker.errors import LeaseExpiredError, StaleEpochError
from services.tracker.types import (
    NO_EPOCH,
    DeliveredProgress,
    ExecutorId,
    ExecutorOffer,
    ExecutorWriter,
    GatewayWriter,
    GeneratedProgress,
    Lease,
    Lifetimes,
    Registration,
    ReportResult,
    RequestKey,
    TrackedRequest,
    TrackerSnapshot,
)


@dataclass(slots=True)
class _Refusals:
    unknown: list[RequestKey] = field(default_factory=list)
    stale: list[RequestKey] = field(default_factory=list)
    illegal: list[RequestKey] = field(default_factory=list)

    def to_result(self) -> ReportResult:
        return ReportResult(
            unknown=tuple(self.unknown), stale=tuple(self.stale), illegal=tuple(self.illegal)
        )


class MemoryTrackerStore:
    """Holds every record in memory. Methods run without a suspension, hence atomically."""

    def __init__(self, lifetimes: Lifetimes, *, clock: Clock) -> None:
        """`clock` returns wall-clock seconds."""
        self._lifetimes = lifetimes
        self._clock = clock
        self._leases: dict[ExecutorId, Lease] = {}
        self._records: dict[RequestKey, TrackedRequest] = {}

    async def register_executor(self, offer: ExecutorOffer) -> None:
        stored = self._leases.get(offer.executor_id)
        if stored is not None and stored.offer.epoch > offer.epoch:
            raise StaleEpochError(f"executor {offer.executor_id} has a newer process")
        self._leases[offer.executor_id] = Lease(
            offer=offer, expires_at_s=self._clock() + self._lifetimes.lease_ttl_s
        )

    async def renew_lease(self, writer: ExecutorWriter, load: ExecutorLoad) -> None:
        lease = self._held_lease(writer)
        self._leases[writer.executor_id] = Lease(
            offer=replace(lease.offer, load=load),
            expires_at_s=self._clock() + self._lifetimes.lease_ttl_s,
        )

    async def release_lease(self, writer: ExecutorWriter) -> None:
        lease = self._leases.get(writer.executor_id)
        if lease is None or lease.offer.epoch < writer.epoch:
            return
        if lease.offer.epoch > writer.epoch:
            raise StaleEpochError(f"executor {writer.executor_id} has a newer process")
        self._leases[writer.executor_id] = replace(lease, expires_at_s=self._clock())

    async def list_executors(self) -> list[Lease]:
        leases = (self._live_lease(executor_id) for executor_id in sorted(self._leases))
        return [lease for lease in leases if lease is not None]

    async def register(
        self, gateway: GatewayWriter, registrations: Sequence[Registration]
    ) -> list[RequestKey]:
        return [new.key for new in registrations if not self._register_one(gateway, new)]

    async def report_generated(
        self, executor: ExecutorWriter, progress: Sequence[GeneratedProgress]
    ) -> ReportResult:
        self._held_lease(executor)
        refused = _Refusals()
        for entry in progress:
            key = RequestKey(executor_id=executor.executor_id, request_id=entry.request_id)
            record = self._live_record(key)
            if record is None or record.generation < entry.generation:
                refused.unknown.append(key)
            elif record.generation > entry.generation or record.executor_epoch > executor.epoch:
                refused.stale.append(key)
            else:
                self._apply_generated(record, executor, entry, refused)
        return refused.to_result()

    async def report_delivered(
        self, gateway: GatewayWriter, progress: Sequence[DeliveredProgress]
    ) -> ReportResult:
        refused = _Refusals()
        for entry in progress:
            record = self._live_record(entry.key)
            if record is None or record.generation < entry.generation:
                refused.unknown.append(entry.key)
            elif record.generation > entry.generation or not _owns(gateway, record):
                refused.stale.append(entry.key)
            else:
                self._apply_delivered(record, gateway, entry)
        return refused.to_result()

    async def snapshot(self, executor_id: ExecutorId) -> TrackerSnapshot:
        return TrackerSnapshot.of(self._live_records(executor_id), self._live_lease(executor_id))

    def _register_one(self, gateway: GatewayWriter, new: Registration) -> bool:
        known = self._live_record(new.key)
        if known is not None and known.generation > new.generation:
            return False
        if known is not None and known.generation == new.generation:
            if not _owns(gateway, known):
                return False
            self._write(replace(known, gateway_epoch=gateway.epoch))
            return True
        lease = self._live_lease(new.key.executor_id)
        self._write(
            TrackedRequest(
                key=new.key,
                generation=new.generation,
                gateway_id=gateway.gateway_id,
                gateway_epoch=gateway.epoch,
                executor_epoch=lease.offer.epoch if lease else NO_EPOCH,
                state=RequestStatus.QUEUED,
                num_prompt_tokens=new.num_prompt_tokens,
                service_level=new.service_level,
                registered_at_s=self._clock(),
                expires_at_s=0.0,
            )
        )
        return True

    def _apply_generated(
        self,
        record: TrackedRequest,
        executor: ExecutorWriter,
        entry: GeneratedProgress,
        refused: _Refusals,
    ) -> None:
        state = entry.state or record.state
        if state is not record.state and state not in EDGES[record.state]:
            refused.illegal.append(record.key)
            state = record.state
        record = replace(record, state=state, executor_epoch=executor.epoch)
        count = entry.num_generated_tokens
        if count is not None and (record.generated_at_s is None or count > record.num_generated):
            record = replace(record, num_generated=count, generated_at_s=self._clock())
        self._write(record)

    def _apply_delivered(
        self, record: TrackedRequest, gateway: GatewayWriter, entry: DeliveredProgress
    ) -> None:
        record = replace(record, gateway_epoch=gateway.epoch)
        count = entry.num_delivered_tokens
        if count is not None and (record.delivered_at_s is None or count > record.num_delivered):
            record = replace(record, num_delivered=count, delivered_at_s=self._clock())
        self._write(record)

    def _write(self, record: TrackedRequest) -> None:
        """Store `record` with a fresh expiry."""
        expires_at_s = self._clock() + self._lifetimes.request_s(record.state)
        self._records[record.key] = replace(record, expires_at_s=expires_at_s)

    def _live_record(self, key: RequestKey) -> TrackedRequest | None:
        record = self._records.get(key)
        if record is not None and record.expires_at_s <= self._clock():
            del self._records[key]
            return None
        return record

    def _live_records(self, executor_id: ExecutorId) -> list[TrackedRequest]:
        keys = [key for key in self._records if key.executor_id == executor_id]
        return [record for key in keys if (record := self._live_record(key)) is not None]

    def _live_lease(self, executor_id: ExecutorId) -> Lease | None:
        lease = self._leases.get(executor_id)
        return lease if lease is not None and self._clock() < lease.expires_at_s else None

    def _held_lease(self, writer: ExecutorWriter) -> Lease:
        stored = self._leases.get(writer.executor_id)
        if stored is not None and stored.offer.epoch > writer.epoch:
            raise StaleEpochError(f"executor {writer.executor_id} has a newer process")
        lease = self._live_lease(writer.executor_id)
        if lease is None or lease.offer.epoch < writer.epoch:
            raise LeaseExpiredError(f"executor {writer.executor_id} holds no lease; register again")
        return lease


def _owns(gateway: GatewayWriter, record: TrackedRequest) -> bool:
    return gateway.gateway_id == record.gateway_id and gateway.epoch >= record.gateway_epoch
