"""`EngineSeam` on a layer-wise scheduler."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

from services.control.link_rate import LinkRate
from services.control.options import ControllerOptions
from services.control.prediction import PlacedRequest
from services.control.request_ledger import RequestLedger
from services.control.request_state import NOTHING, StateReader, phase_of
from services.control.types import Links
from services.executor.kv_options import KVOptions
from services.executor.scheduler.kv_view import num_leaving_blocks, num_returning_blocks, view_of
from services.executor.scheduler.run_control import RunControl
from services.executor.scheduler.vllm_scheduler import VllmScheduler
from services.executor.transfer_types import CHUNK_BYTES
from services.kit.clock import Clock
from services.placement.blocks import Residency
from services.placement.layer_placement import LayerPlacement
from services.placement.plan_rules import LiveRequest
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
        options: ControllerOptions,
        shape: EngineShape,
        *,
        now_s: Clock,
    ) -> None:
        self._scheduler, self._control = scheduler, control
        self._guard, self._owner = control.guard, control.transfers.owner
        self._kv_options = KVOptions.of(scheduler.vllm_config)
        self._options, self._shape, self._now_s = options, shape, now_s
        self.ledger: RequestLedger  # set by whoever makes both
        self.last_scheduled: tuple[str, ...] = ()  # of the newest step

    @property
    def shape(self) -> EngineShape:
        return self._shape

    # -- reading -----------------------------------------------------------------------------

    def _requests(self) -> Iterator[tuple["Request", bool]]:
        """Yield live requests in scheduling order, and whether each is in the running queue."""
        scheduler = self._scheduler
        for request in scheduler.running:
            yield request, True
        for request in chain(scheduler.kv_holding_waiting, scheduler.waiting):
            yield request, False

    def snapshot(self, *, epoch: int, profile: Profile, links: Links) -> Snapshot:
        now_s, scheduled = self._now_s(), set(self.last_scheduled)
        reader = StateReader(self._shape, self.ledger.answer_lengths, now_s)
        states: list[RequestState] = []
        num_idle_staging = 0
        for request, runs in islice(self._requests(), MAX_REQUESTS):
            entry = self.ledger.entries.get(request.request_id)
            if entry is None:
                continue
            # One that is being brought back holds blocks and has no tokens yet.
            kv = self._owner.requests.get(request.request_id) if runs else None
            held = request.request_id in self._control.holds
            states.append(
                reader.state(
                    request,
                    entry,
                    NOTHING if kv is None else view_of(kv),
                    phase_of(request, runs=runs, held=held),
                )
            )
            if kv is not None and request.request_id not in scheduled:
                num_idle_staging += sum(len(buffer) for buffer in kv.staging)
        completed_s = self.ledger.last_completion_s
        return Snapshot(
            epoch=epoch,
            policy=self._options.policy,
            seed=self._options.seed,
            engine=self._shape,
            requests=tuple(states),
            # What the guard keeps free before a layer comes back is not the planner's to give away.
            num_free_blocks=max(0, self._owner.pool.get_num_free_blocks() - self._guard.num_spare),
            num_free_host_blocks=self._owner.host.num_free,
            num_free_staging_blocks=num_idle_staging,
            last_completion_age_s=None if completed_s is None else now_s - completed_s,
            h2d=links.h2d,
            d2h=links.d2h,
            profile=profile,
            parameters=self._options.parameters,
            num_write_through_blocks=self._kv_options.max_mirrored_blocks_per_step,
        )

    def links(self, h2d: LinkRate, d2h: LinkRate) -> Links:
        requests, block_bytes = self._owner.requests.values(), self._shape.block_bytes
        returning = sum(map(num_returning_blocks, requests)) * block_bytes
        leaving = sum(map(num_leaving_blocks, requests)) * block_bytes
        return Links(
            h2d=h2d.link(chunk_bytes=CHUNK_BYTES, num_queued_bytes=returning),
            d2h=d2h.link(chunk_bytes=CHUNK_BYTES, num_queued_bytes=leaving),
        )

    def placed_requests(self) -> list[PlacedRequest]:
        requests = (self._owner.requests.get(name) for name in self.last_scheduled)
        return [
            PlacedRequest(
                num_tokens=kv.num_tokens, offloaded=tuple(kv.offloaded), num_buffers=len(kv.staging)
            )
            for kv in requests
            if kv is not None
        ]

    def live_requests(self) -> list[LiveRequest]:
        return [
            LiveRequest(
                request_id=RequestId(request.request_id),
                num_tokens=request.num_tokens,
                residency=self._residency(request.request_id),
                holds_kv=runs,
                paused=request.request_id in self._control.holds,
            )
            for request, runs in self._requests()
        ]

    def _residency(self, request_id: str) -> Residency:
        kv = self._owner.requests.get(request_id)
        num_offloaded = 0 if kv is None else len(kv.offloaded)
        return Residency(
            num_offloaded=num_offloaded, num_staging=max(1, len(kv.staging) if kv else 0)
        )

    def num_runnable(self) -> int:
        holds = self._control.holds
        num_running = sum(r.request_id not in holds for r in self._scheduler.running)
        if num_running or not self.last_scheduled:
            return num_running
        return sum(not runs and r.request_id not in holds for r, runs in self._requests())

    def priority(self, request_id: str) -> int:
        priority: int = self._scheduler.requests[request_id].priority
        return priority

    def is_paused(self, request_id: str) -> bool:
        return request_id in self._control.holds

    # -- orders ------------------------------------------------------------------------------

    def place(self, request_id: str, *, groups: Sequence[int], num_buffers: int) -> None:
        placement = LayerPlacement(offloaded=frozenset(groups), num_staging=max(1, num_buffers))
        self._control.place(request_id, placement)

    def release(self, request_id: str) -> None:
        self._guard.forget(request_id)

    def set_deposits(self, num_tokens: Mapping[RequestId, int]) -> None:
        self._control.transfers.write_through.set_deposits(
            {str(request_id): number for request_id, number in num_tokens.items()}
        )

    def pause(self, request_id: str) -> bool:
        self._control.pause(request_id)
        return self.is_paused(request_id)

    def resume(self, request_id: str) -> None:
        self._control.resume(request_id)
