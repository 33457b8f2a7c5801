"""Where requests and leases are recorded. Redis does it; `lab.memory_tracker_store` says how.

Every method is atomic per executor, and idempotent: senders repeat what got no answer.
All but the memory store may raise StoreUnavailableError.
"""

from collections.abc import Sequence
from typing import Protocol

from services.reporting.load import ExecutorLoad
from services.tracker.types import (
    DeliveredProgress,
    ExecutorId,
    ExecutorOffer,
    ExecutorWriter,
    GatewayWriter,
    GeneratedProgress,
    Lease,
    Registration,
    ReportResult,
    RequestKey,
    TrackerSnapshot,
)


class TrackerStore(Protocol):
    async def register_executor(self, offer: ExecutorOffer) -> None:
        """Take or renew a lease. The epoch fences even after the lease has ended: raises
        StaleEpochError if a greater one is stored.
        """

    async def renew_lease(self, writer: ExecutorWriter, load: ExecutorLoad) -> None:
        """Extend a lease. Raises StaleEpochError, LeaseExpiredError."""

    async def release_lease(self, writer: ExecutorWriter) -> None:
        """End a lease; a missing one is no error. Raises StaleEpochError."""

    async def list_executors(self) -> list[Lease]:
        """Return held leases sorted by executor id."""

    async def register(
        self, gateway: GatewayWriter, registrations: Sequence[Registration]
    ) -> list[RequestKey]:
        """Record routed requests. Returns those that were not, as a newer one is known.

        The same generation of the same gateway keeps its counts; a greater one starts anew.
        """

    async def report_generated(
        self, executor: ExecutorWriter, progress: Sequence[GeneratedProgress]
    ) -> ReportResult:
        """Merge what an executor generated. Raises LeaseExpiredError, StaleEpochError."""

    async def report_delivered(
        self, gateway: GatewayWriter, progress: Sequence[DeliveredProgress]
    ) -> ReportResult:
        """Merge what a gateway delivered, after a final state too."""

    async def snapshot(self, executor_id: ExecutorId) -> TrackerSnapshot:
        """Return what is recorded of one executor; see `TrackerSnapshot.of`."""
