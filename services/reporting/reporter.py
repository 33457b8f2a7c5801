"""Keeps the tracker informed without ever making a token wait.

Executors and gateways note progress here synchronously; one loop sends it in batches, repeats
what was not applied, and rebuilds the tracker's record after a loss.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import structlog
from grpc import aio
from prometheus_client import Counter

from evenflow.tracker.v1 import tracker_pb2 as pb
from services.kit import clock
from services.kit.errors import InvalidRequestError, ServiceError
from services.kit.rpc import service_errors
from services.reporting.ledger import NOW, LedgerLimits, ProgressLedger, RequestRef, Sent

if TYPE_CHECKING:
    from evenflow.tracker.v1.tracker_pb2_grpc import TrackerServiceAsyncStub

log = structlog.get_logger()

ROUNDS = Counter(
    "evenflow_reporter_rounds_total", "Batches sent to the tracker, by result.", ["result"]
)
ENTRIES = Counter(
    "evenflow_reporter_entries_total",
    "Entries sent to the tracker, by its answer.",
    ["answer"],
)

LEASE_EXPIRED = "LEASE_EXPIRED"


class SenderKind(Enum):
    EXECUTOR = "executor"
    GATEWAY = "gateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """A sender. Executors write generated counts and states, gateways delivered counts."""

    kind: SenderKind
    id: str
    epoch: int  # start of the process, see `clock.process_epoch`


@dataclass(frozen=True, slots=True, kw_only=True)
class ReporterOptions:
    """How the reporter sends. Seconds."""

    interval_s: float = 0.05  # at most one registration and one report per interval
    rpc_timeout_s: float = 2.0
    max_backoff_s: float = 2.0  # between two tries while the tracker is away
    max_entries: int = 1_000  # per message; the rest goes with the next one
    limits: LedgerLimits = field(default_factory=LedgerLimits)


async def _no_lease() -> None:
    """Do nothing: for senders that hold no lease."""


class TrackerReporter:
    """Sends the newest absolute counts of a process's requests to the tracker.

    `register` and `update` are synchronous, O(1), never block and never raise for a missing
    tracker. Nothing is sent unless `run` runs.
    """

    def __init__(
        self,
        stub: "TrackerServiceAsyncStub",
        *,
        sender: Sender,
        options: ReporterOptions | None = None,
        on_lease_lost: Callable[[], Awaitable[None]] = _no_lease,
        clock: clock.Clock = clock.monotonic_s,
    ) -> None:
        """`on_lease_lost` is awaited when the tracker says that the executor holds no lease; it
        should register the executor again. Its gRPC and service errors are taken as "not yet".
        """
        self._stub = stub
        self._sender = sender
        self._options = options or ReporterOptions()
        self._on_lease_lost = on_lease_lost
        self._clock = clock
        self._ledger = ProgressLedger(self._options.limits)
        self._changed = asyncio.Event()
        self._sending = asyncio.Lock()
        self._num_failures = 0  # rounds in a row that got no answer

    def register(self, registration: pb.Registration) -> None:
        """Queue a routed request (gateways only); kept to register it again after a loss."""
        assert self._sender.kind is SenderKind.GATEWAY
        self._ledger.register(registration)
        self._changed.set()

    def update(
        self,
        ref: RequestRef,
        *,
        num_generated: int | None = None,
        num_delivered: int | None = None,
        state: "pb.RequestState.ValueType" = pb.REQUEST_STATE_UNSPECIFIED,
        final: bool = False,
    ) -> None:
        """Note absolute counts of a request; what is left out is unchanged.

        Counts merge by maximum. `final` says that no state change will follow; the request is
        kept until the tracker has applied its end, then forgotten. Later counts are still taken.
        """
        entry = self._ledger.entry(ref)
        if entry is None:
            return
        if num_generated is not None:
            entry.num_generated = max(num_generated, entry.num_generated or 0)
        if num_delivered is not None:
            entry.num_delivered = max(num_delivered, entry.num_delivered or 0)
        if entry.ended_at_s is None:
            entry.state = state or entry.state
            entry.ended_at_s = self._clock() if final else None
        entry.version += 1
        if not entry.times_unknown:
            entry.due_s = NOW
        self._changed.set()

    @property
    def num_pending(self) -> int:
        """Return how many requests have something that the tracker has not applied."""
        return self._ledger.num_pending

    @property
    def num_tracked(self) -> int:
        """Return how many requests are held, acknowledged ones included."""
        return len(self._ledger)

    async def run(self) -> None:
        """Send until cancelled. Never raises because of the tracker."""
        while True:
            self._changed.clear()
            await self.send_due()
            await asyncio.sleep(self._pause_s())
            await self._wait_until_due()

    async def flush(self, timeout_s: float) -> None:
        """Try to send what is pending; return when all is applied or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._ledger.num_pending:
                    await self.send_due()
                    await asyncio.sleep(self._pause_s())
        except TimeoutError:
            log.warning("tracker_flush_timed_out", num_pending=self._ledger.num_pending)

    async def send_due(self) -> None:
        """Send one round: at most one registration and one report, nothing if nothing is due."""
        async with self._sending:
            sent = self._ledger.take_due(self._clock(), limit=self._options.max_entries)
            if not sent:
                return
            try:
                await self._deliver(sent)
            except (ServiceError, aio.BaseError) as error:
                await self._note_failure(error)
            else:
                self._note_success()

    async def _deliver(self, sent: list[Sent]) -> None:
        """Send `sent`. An entry that the tracker calls invalid is found by halving, and dropped:
        it must not hold up the others.
        """
        try:
            with service_errors():
                registered = await self._send_registrations(sent)
                await self._send_report(registered)
        except InvalidRequestError as error:
            if len(sent) > 1:
                middle = len(sent) // 2
                await self._deliver(sent[:middle])
                await self._deliver(sent[middle:])
                return
            log.error("tracker_entry_refused", ref=sent[0].entry.ref, detail=str(error))
            self._ledger.forget(sent)
            ENTRIES.labels("invalid").inc()

    async def _send_registrations(self, sent: list[Sent]) -> list[Sent]:
        """Register those that need it. Returns `sent` without those a newer generation replaced."""
        batch = [s for s in sent if s.entry.needs_registering]
        if not batch:
            return sent
        request = pb.RegisterRequest(gateway_id=self._sender.id, gateway_epoch=self._sender.epoch)
        request.registrations.extend(
            s.entry.registration for s in batch if s.entry.registration is not None
        )
        response = await self._stub.Register(request, timeout=self._options.rpc_timeout_s)
        stale = _keys(response.stale)
        self._ledger.mark_registered(batch)
        self._ledger.forget(s for s in batch if s.entry.key in stale)
        ENTRIES.labels("stale").inc(len(stale))
        return [s for s in sent if s.entry.key not in stale]

    async def _send_report(self, sent: list[Sent]) -> None:
        if not sent:
            return
        request = pb.ReportRequest(
            epoch=self._sender.epoch, progress=[s.entry.to_progress() for s in sent]
        )
        if self._sender.kind is SenderKind.EXECUTOR:
            request.executor_id = self._sender.id
        else:
            request.gateway_id = self._sender.id
        response = await self._stub.Report(request, timeout=self._options.rpc_timeout_s)
        self._settle(sent, response)

    def _settle(self, sent: list[Sent], response: pb.ReportResponse) -> None:
        unknown, stale = _keys(response.unknown), _keys(response.stale)
        refused, now_s = unknown | stale, self._clock()
        self._ledger.mark_applied((s for s in sent if s.entry.key not in refused), now_s)
        self._ledger.mark_unknown((s for s in sent if s.entry.key in unknown), now_s)
        self._ledger.forget(s for s in sent if s.entry.key in stale)
        ENTRIES.labels("applied").inc(len(sent) - len(unknown) - len(stale))
        ENTRIES.labels("unknown").inc(len(unknown))
        ENTRIES.labels("stale").inc(len(stale))
        ENTRIES.labels("illegal").inc(len(response.illegal))

    async def _note_failure(self, error: Exception) -> None:
        reason = getattr(error, "reason", type(error).__name__)
        ROUNDS.labels(reason).inc()
        if self._num_failures == 0:
            log.warning("tracker_report_failed", reason=reason, detail=str(error))
        self._num_failures += 1
        if reason == LEASE_EXPIRED:
            self._ledger.mark_lost()
            await self._regain_lease()

    async def _regain_lease(self) -> None:
        try:
            with service_errors():
                await self._on_lease_lost()
        except (ServiceError, aio.BaseError) as error:
            log.warning("tracker_lease_not_regained", detail=str(error))
        else:
            self._num_failures = 0  # the next report is worth trying at once

    def _note_success(self) -> None:
        ROUNDS.labels("OK").inc()
        if self._num_failures:
            log.info("tracker_report_recovered", num_failures=self._num_failures)
            self._num_failures = 0

    def _pause_s(self) -> float:
        backoff_s = self._options.interval_s * 2.0 ** min(self._num_failures, 30)
        return min(backoff_s, max(self._options.max_backoff_s, self._options.interval_s))

    async def _wait_until_due(self) -> None:
        wait_s = self._ledger.next_due_s() - self._clock()
        if wait_s <= 0:
            return
        try:
            async with asyncio.timeout(None if wait_s == float("inf") else wait_s):
                await self._changed.wait()
        except TimeoutError:
            return


def _keys(named: Iterable[pb.RequestKey]) -> set[tuple[str, str]]:
    return {(key.executor_id, key.request_id) for key in named}
