"""`EngineSeam` on a layer-wise scheduler."""

import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING

from services.control.measures.link_rate import LinkRate
from services.control.measures.prediction import PlacedRequest
from services.control.options import ControllerOptions
from services.control.requests.request_ledger import RequestLedger
from services.control.requests.request_record import RequestRecord
from services.control.requests.request_state import NOTHING, StateReader, phase_of
from services.control.types import Links
from services.executor.blocks.residency import RequestKV
from services.executor.kv_options import KVOptions
from services.executor.scheduler.closed_loop.kv_view import (
    num_leaving_blocks,
    num_returning_blocks,
    view_of,
)
from services.executor.scheduler.run_control import RunControl
from services.executor.scheduler.vllm_scheduler import VllmScheduler
from services.executor.step_messages import CHUNK_BYTES
from services.placement.blocks import RESIDENT, Residency
from services.placement.judging.plan_rules import LivePlace
from services.placement.types import EngineShape, Profile, RequestId, RequestState, Snapshot

if TYPE_CHECKING:
    from vllm.v1.request import Request

MAX_REQUESTS = 1_000  # of a snapshot; the planner refuses more


class SchedulerSeam:
    """Reads the scheduler and gives it orders. Views of KV live for one question only."""

    def __init__(
        self,
        scheduler: VllmScheduler,
        control: RunControl,
        ledger: RequestLedger,
        options: ControllerOptions,
        shape: Callable[[], EngineShape],
    ) -> None:
        self._scheduler = scheduler
        self._num_spare, self._owner = control.guard.num_spare, control.transfers.owner
        self._kv_options = KVOptions.of(scheduler.vllm_config)
        self._options, self._shape = options, shape
        self._ledger, self._records = ledger, ledger.records

    @property
    def shape(self) -> EngineShape:
        return self._shape()

    # -- reading -----------------------------------------------------------------------------

    def _requests(self) -> "Iterator[tuple[Request, RequestRecord[RequestKV], bool]]":
        """Yield live requests in scheduling order, and whether each is in the running queue."""
        scheduler = self._scheduler
        for request in scheduler.running:
            yield request, self._records[request.request_id], True
        for request in chain(scheduler.kv_holding_waiting, scheduler.waiting):
            yield request, self._records[request.request_id], False

    def snapshot(self, *, epoch: int, profile: Profile, links: Links) -> Snapshot:
        now_s = time.monotonic()
        reader = StateReader(self.shape, self._ledger.answer_lengths, now_s)
        states: list[RequestState] = []
        for request, record, runs in islice(self._requests(), MAX_REQUESTS):
            # One that is being brought back holds blocks and has no tokens yet.
            kv = record.kv if runs else None
            view = NOTHING if kv is None else view_of(kv)
            phase = phase_of(request, runs=runs, held=record.is_held)
            states.append(reader.state(request, record, view, phase))
        completed_s = self._ledger.last_completion_s
        return Snapshot(
            epoch=epoch,
            policy=self._options.policy,
            seed=self._options.seed,
            engine=self.shape,
            requests=tuple(states),
            # What the guard keeps free before a layer comes back is not the planner's to give away.
            num_free_blocks=max(0, self._owner.pool.get_num_free_blocks() - self._num_spare),
            last_completion_age_s=None if completed_s is None else now_s - completed_s,
            h2d=links.h2d,
            d2h=links.d2h,
            profile=profile,
            parameters=self._options.parameters,
            num_write_through_blocks=self._kv_options.max_mirrored_blocks_per_step,
        )

    def links(self, h2d: LinkRate, d2h: LinkRate) -> Links:
        kvs, block_bytes = self._owner.kvs, self.shape.block_bytes
        returning = sum(map(num_returning_blocks, kvs)) * block_bytes
        leaving = sum(map(num_leaving_blocks, kvs)) * block_bytes
        return Links(
            h2d=h2d.link(chunk_bytes=CHUNK_BYTES, num_queued_bytes=returning),
            d2h=d2h.link(chunk_bytes=CHUNK_BYTES, num_queued_bytes=leaving),
        )

    def placed_requests(self) -> list[PlacedRequest]:
        records = map(self._records.get, self._ledger.last_scheduled)
        return [
            PlacedRequest(
                num_tokens=kv.num_tokens, offloaded=tuple(kv.offloaded), num_buffers=len(kv.staging)
            )
            for record in records
            if record is not None and (kv := record.kv) is not None
        ]

    def live_requests(self) -> list[LivePlace]:
        return [
            LivePlace(
                request_id=RequestId(request.request_id),
                num_tokens=request.num_tokens,
                residency=_residency(record.kv),
                holds_kv=runs,
                paused=record.is_held,
            )
            for request, record, runs in self._requests()
        ]

    def num_runnable(self) -> int:
        places = [runs for _, record, runs in self._requests() if not record.is_held]
        num_running = sum(places)
        return num_running if num_running or not self._ledger.last_scheduled else len(places)

    def priority(self, record: RequestRecord[RequestKV]) -> int:
        priority: int = self._scheduler.requests[record.request_id].priority
        return priority


def _residency(kv: RequestKV | None) -> Residency:
    if kv is None:
        return RESIDENT
    return Residency(num_offloaded=len(kv.offloaded), num_staging=max(1, len(kv.staging)))
