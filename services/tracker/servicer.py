"""gRPC edge of the tracker: check, convert, delegate. No state, no policy."""

import structlog

from evenflow.tracker.v1 import tracker_pb2 as pb
from evenflow.tracker.v1 import tracker_pb2_grpc as pb_grpc
from services.kit.clock import Clock
from services.kit.errors import InvalidRequestError
from services.kit.rpc import Context
from services.kit.wire import read, write
from services.tracker import convert
from services.tracker.metrics import ENTRIES, REGISTRATIONS, REPORTS
from services.tracker.store import TrackerStore
from services.tracker.types import ExecutorOffer, ExecutorRef, ExecutorWriter, Renewal, ReportResult

log = structlog.get_logger()


class TrackerServicer(pb_grpc.TrackerServiceServicer):
    def __init__(self, store: TrackerStore, *, lease_ttl_s: float, clock: Clock) -> None:
        """`clock` is the store's: wall-clock seconds."""
        self._store = store
        self._lease_ttl = convert.duration_to_proto(lease_ttl_s)
        self._clock = clock

    async def RegisterExecutor(
        self, request: pb.RegisterExecutorRequest, context: Context
    ) -> pb.RegisterExecutorResponse:
        offer = read(ExecutorOffer, request)

        await self._store.register_executor(offer)

        log.info("executor_registered", executor_id=offer.executor_id, epoch=offer.epoch)
        return pb.RegisterExecutorResponse(lease_ttl=self._lease_ttl)

    async def RenewLease(
        self, request: pb.RenewLeaseRequest, context: Context
    ) -> pb.RenewLeaseResponse:
        renewal = read(Renewal, request)

        await self._store.renew_lease(renewal.writer, renewal.load)

        return pb.RenewLeaseResponse(lease_ttl=self._lease_ttl)

    async def ReleaseLease(
        self, request: pb.ReleaseLeaseRequest, context: Context
    ) -> pb.ReleaseLeaseResponse:
        writer = read(ExecutorWriter, request)

        await self._store.release_lease(writer)

        log.info("lease_released", executor_id=writer.executor_id, epoch=writer.epoch)
        return pb.ReleaseLeaseResponse()

    async def ListExecutors(
        self, request: pb.ListExecutorsRequest, context: Context
    ) -> pb.ListExecutorsResponse:
        leases = await self._store.list_executors()

        now_s = self._clock()
        return pb.ListExecutorsResponse(
            executors=[convert.lease_to_proto(lease, now_s=now_s) for lease in leases]
        )

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        gateway, registrations = convert.registrations_from_proto(request)

        stale = await self._store.register(gateway, registrations)

        REGISTRATIONS.labels("recorded").inc(len(registrations) - len(stale))
        REGISTRATIONS.labels("stale").inc(len(stale))
        return pb.RegisterResponse(stale=[write(key, pb.RequestKey) for key in stale])

    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.ReportResponse:
        sender = request.WhichOneof("sender")
        if sender is None:
            raise InvalidRequestError("sender: is required", field="sender")

        result = await (
            self._report_generated(request)
            if sender == "executor_id"
            else self._report_delivered(request)
        )

        REPORTS.labels(sender.removesuffix("_id")).inc()
        refused = len(result.unknown) + len(result.stale)
        ENTRIES.labels("applied").inc(len(request.progress) - refused)
        ENTRIES.labels("unknown").inc(len(result.unknown))
        ENTRIES.labels("stale").inc(len(result.stale))
        ENTRIES.labels("illegal").inc(len(result.illegal))
        return write(result, pb.ReportResponse)

    async def Snapshot(self, request: pb.SnapshotRequest, context: Context) -> pb.SnapshotResponse:
        executor = read(ExecutorRef, request)

        snapshot = await self._store.snapshot(executor.executor_id)

        return convert.snapshot_to_proto(snapshot, now_s=self._clock())

    async def _report_generated(self, request: pb.ReportRequest) -> ReportResult:
        report = convert.generated_from_proto(request)
        return await self._store.report_generated(report.writer, report.progress)

    async def _report_delivered(self, request: pb.ReportRequest) -> ReportResult:
        report = convert.delivered_from_proto(request)
        return await self._store.report_delivered(report.writer, report.progress)
