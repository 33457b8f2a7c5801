"""The executor's side of the tracker: its lease, and how far its requests have come."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import structlog
from grpc import aio

from evenflow.executor.v1.executor_pb2 import Load
from evenflow.tracker.v1 import tracker_pb2 as pb
from evenflow.tracker.v1.tracker_pb2_grpc import TrackerServiceStub
from services.generation.lifecycle import RequestStatus
from services.kit.errors import ConflictError, NotFoundError, ServiceError
from services.kit.rpc import service_errors
from services.kit.wire import numbers, write
from services.reporting.ledger import RequestRef
from services.reporting.load import ExecutorLoad
from services.reporting.reporter import Sender, SenderKind, TrackerReporter

if TYPE_CHECKING:
    from evenflow.tracker.v1.tracker_pb2_grpc import TrackerServiceAsyncStub

log = structlog.get_logger()

RPC_TIMEOUT_S = 2.0
RETRY_S = 0.5  # between two tries to get or keep a lease
FLUSH_TIMEOUT_S = 2.0

_STATES = numbers(RequestStatus, pb.RequestState)


class TrackerClient:
    """Keeps a lease while `run` runs; `note` costs a dictionary entry, tracker or no tracker."""

    def __init__(self, channel: aio.Channel, *, executor_id: str, epoch: int) -> None:
        """`epoch` grows with every start of the executor, see `kit.clock.process_epoch`."""
        self._stub: TrackerServiceAsyncStub = TrackerServiceStub(channel)
        self._executor_id = executor_id
        self._epoch = epoch
        self._offer = pb.RegisterExecutorRequest(executor_id=executor_id, epoch=epoch)
        self._get_load: Callable[[], ExecutorLoad] = ExecutorLoad
        self._lease_ttl_s = 0.0
        self._reporter = TrackerReporter(
            self._stub,
            sender=Sender(kind=SenderKind.EXECUTOR, id=executor_id, epoch=epoch),
            on_lease_lost=self._register,
        )

    def note(
        self, request_id: str, *, generation: int, num_generated: int, status: RequestStatus
    ) -> None:
        """Note the progress of a request."""
        self._reporter.update(
            RequestRef(self._executor_id, request_id, generation),
            num_generated=num_generated,
            state=_STATES[status],
            final=status.is_final,
        )

    async def run(self, *, address: str, model: str, get_load: Callable[[], ExecutorLoad]) -> None:
        """Hold the lease and send reports until cancelled."""
        self._offer.address, self._offer.model = address, model
        self._get_load = get_load
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reporter.run())
            tasks.create_task(self._hold_lease())

    async def _hold_lease(self) -> None:
        is_held, is_failing = False, False
        while True:
            try:
                with service_errors():
                    await (self._renew() if is_held else self._register())
            except (ServiceError, aio.BaseError) as error:
                # A newer process of the same id may hold it; should that end, this one is next.
                is_held = is_held and not isinstance(error, NotFoundError | ConflictError)
                if not is_failing:
                    reason = getattr(error, "reason", type(error).__name__)
                    log.warning("lease_not_held", reason=reason, detail=str(error))
                is_failing = True
                await asyncio.sleep(RETRY_S)
                continue
            if is_failing or not is_held:
                log.info("lease_held", lease_ttl_s=self._lease_ttl_s)
            is_held, is_failing = True, False
            await asyncio.sleep(self._lease_ttl_s / 3)

    async def _register(self) -> None:
        self._offer.load.CopyFrom(self._load())
        response = await self._stub.RegisterExecutor(self._offer, timeout=RPC_TIMEOUT_S)
        self._lease_ttl_s = _seconds(response.lease_ttl.ToTimedelta())

    async def _renew(self) -> None:
        request = pb.RenewLeaseRequest(
            executor_id=self._executor_id, epoch=self._epoch, load=self._load()
        )
        response = await self._stub.RenewLease(request, timeout=RPC_TIMEOUT_S)
        self._lease_ttl_s = _seconds(response.lease_ttl.ToTimedelta())

    def _load(self) -> Load:
        return write(self._get_load(), Load)

    async def release(self) -> None:
        """Give the lease back, so that this executor is not listed; unanswered, it expires."""
        request = pb.ReleaseLeaseRequest(executor_id=self._executor_id, epoch=self._epoch)
        try:
            with service_errors():
                await self._stub.ReleaseLease(request, timeout=RPC_TIMEOUT_S)
        except (ServiceError, aio.BaseError) as error:
            log.warning("lease_not_released", detail=str(error))

    async def flush(self) -> None:
        """Try to send what is pending, for a short time."""
        await self._reporter.flush(FLUSH_TIMEOUT_S)


def _seconds(duration: timedelta) -> float:
    return duration.total_seconds()
