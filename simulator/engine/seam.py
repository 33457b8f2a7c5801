"""`EngineSeam` on the simulated scheduler: what the services' controller reads and orders."""

from collections.abc import Iterator

from services.control.measures.link_rate import LinkRate
from services.control.measures.prediction import PlacedRequest
from services.control.measures.rates import MAX_MIRRORED_BLOCKS
from services.control.options import ControllerOptions
from services.control.requests.request_ledger import RequestLedger
from services.control.requests.request_record import RequestRecord
from services.control.requests.request_state import NOTHING, KVView, StateReader, phase_of
from services.control.run_director import RunPlace, phase_in_queue
from services.control.types import Links
from services.placement.blocks import Residency
from services.placement.judging.plan_rules import LivePlace
from services.placement.run.types import RunDecision, RunPhase
from services.placement.types import EngineShape, Profile, RequestId, RequestState, Snapshot
from simulator.device.copies import Lane
from simulator.engine.scheduler import Scheduler
from simulator.memory.kv import KVState
from simulator.memory.requests import SimulatedRequest


class SimulatedSeam:
    """Reads the scheduler and gives it orders, at the instant `now_s`."""

    def __init__(
        self,
        scheduler: Scheduler,
        h2d: Lane,
        d2h: Lane,
        ledger: RequestLedger,
        options: ControllerOptions,
    ) -> None:
        self._scheduler, self._h2d, self._d2h = scheduler, h2d, d2h
        self._ledger, self._options = ledger, options
        self.now_s = 0.0

    @property
    def shape(self) -> EngineShape:
        return self._scheduler.shape

    def _request(self, record: RequestRecord[KVState]) -> SimulatedRequest:
        return self._scheduler.moves.requests[RequestId(record.request_id)]

    # -- reading -----------------------------------------------------------------------------

    def snapshot(self, *, epoch: int, profile: Profile, links: Links) -> Snapshot:
        scheduler, options = self._scheduler, self._options
        reader = StateReader(self.shape, self._ledger.answer_lengths, self.now_s)
        completed_s = self._ledger.last_completion_s
        return Snapshot(
            epoch=epoch,
            policy=options.policy,
            seed=options.seed,
            engine=self.shape,
            requests=tuple(self._state(reader, request) for request in scheduler.live),
            num_free_blocks=max(0, scheduler.pool.num_free - scheduler.guard.num_spare),
            last_completion_age_s=None if completed_s is None else self.now_s - completed_s,
            h2d=links.h2d,
            d2h=links.d2h,
            profile=profile,
            parameters=options.parameters,
            num_write_through_blocks=MAX_MIRRORED_BLOCKS,
        )

    def _state(self, reader: StateReader, request: SimulatedRequest) -> RequestState:
        runs = request in self._scheduler.running
        kv = view_of(request.kv) if runs else NOTHING  # what is brought back is not shown
        phase = phase_of(request, runs=runs, held=request.is_paused)
        return reader.state(request, request.record, kv, phase)

    def links(self, h2d: LinkRate, d2h: LinkRate) -> Links:
        returning = sum(
            job.num_left_bytes for r in self._scheduler.live for job in r.kv.restoring.values()
        )
        chunk_bytes, leaving = self._h2d.chunk_bytes, self._d2h.num_queued_bytes
        return Links(
            h2d=h2d.link(chunk_bytes=chunk_bytes, num_queued_bytes=returning),
            d2h=d2h.link(chunk_bytes=chunk_bytes, num_queued_bytes=leaving),
        )

    def num_returning_bytes(self) -> int:
        return self._h2d.num_queued_bytes

    def run_places(self) -> Iterator[RunPlace]:
        scheduler = self._scheduler
        for request in scheduler.running:
            yield RunPlace(request, request.record, RunPhase.RUNNING)
        queue = sorted(scheduler.waiting, key=lambda one: (one.priority, one.spec.arrival_s))
        for request in queue:
            phase = phase_in_queue(request, is_returning=request.record.is_prepared)
            yield RunPlace(request, request.record, phase)

    def num_host_tokens(self, place: RunPlace) -> int:
        request = self._request(place.record)
        if place.phase is RunPhase.RUNNING:
            return request.kv.num_host_blocks * self.shape.block_size
        if place.record.kv is None and place.record.way is None:
            return self.shape.block_size * len(self._scheduler.cached_prefix(request))
        return request.kv.num_tokens

    def park(self, record: RequestRecord[KVState]) -> None:
        self._scheduler.park(self._request(record), self.now_s)

    def obey(self, decision: RunDecision) -> None:
        self._scheduler.decision = decision
        self._scheduler.resumes.allow(decision.allowed_ways)

    def placed_requests(self) -> list[PlacedRequest]:
        requests = self._scheduler.moves.requests
        names = map(RequestId, self._ledger.last_scheduled)
        kvs = [requests[name].kv for name in names if name in requests]
        return [
            PlacedRequest(
                num_tokens=kv.num_tokens, offloaded=tuple(kv.offloaded), num_buffers=kv.num_buffers
            )
            for kv in kvs
        ]

    def live_requests(self) -> list[LivePlace]:
        return [
            LivePlace(
                request_id=request.request_id,
                num_tokens=request.num_tokens,
                residency=Residency(
                    num_offloaded=len(request.kv.offloaded),
                    num_staging=max(1, request.kv.num_buffers),
                ),
                holds_kv=request in self._scheduler.running,
                paused=request.is_paused,
            )
            for request in self._scheduler.live
        ]

    def num_runnable(self) -> int:
        scheduler = self._scheduler
        num_running = sum(not request.is_paused for request in scheduler.running)
        if num_running or not self._ledger.last_scheduled:
            return num_running
        return len(scheduler.waiting)

    def priority(self, record: RequestRecord[KVState]) -> int:
        return self._request(record).priority


def view_of(kv: KVState) -> KVView:
    """Return where a request's blocks are; staging counts with the first groups it serves."""
    if not kv.num_tokens:
        return NOTHING
    blocks = [kv.num_rows] * kv.geometry.num_groups
    for place, group in enumerate(kv.offloaded):
        if group not in kv.restoring:
            blocks[group] = len(kv.own)
        if place < kv.num_buffers:
            blocks[group] += kv.buffer_length
    return KVView(
        offloaded=tuple(kv.offloaded),
        num_buffers=kv.num_buffers or min(1, len(kv.offloaded)),
        num_blocks=tuple(blocks),
        num_host_blocks=(kv.num_host_blocks,) * kv.geometry.num_groups if kv.mirrored else (),
    )
