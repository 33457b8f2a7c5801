"""vLLM's schedulers with layer-wise KV.

Before each step: what the ranks completed is settled, and the capacity guard moves layer groups.
Then vLLM schedules as it always does, asking the coordinator for blocks.
"""

import itertools
import threading
import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from services.executor.kv.block_owner import BlockOwner
from services.executor.kv.capacity_guard import CapacityGuard, Need
from services.executor.kv.connector import LayerwiseConnector
from services.executor.kv.coordinator import LayerwiseCoordinator
from services.executor.kv.holds import HoldKind, Holds
from services.executor.kv.host_pool import HostPool
from services.executor.kv.options import KVOptions, check_supported
from services.executor.kv.recovery import Recovery, RecoverySchedulerMixin
from services.executor.kv.residency import GroupKV, LayerPlacement, RequestKV
from services.executor.kv.scheduler import EvenflowSchedulerMixin
from services.executor.kv.sizing import are_slots_ready_at_start, num_host_slots
from services.executor.kv.step_orders import StepOrders
from services.executor.kv.transfer_planner import TransferPlanner
from services.executor.observation import RequestState
from services.placement.blocks import BlockGeometry

NEVER = 1 << 60  # a step that does not come
IDLE_WAIT_S = 0.005  # between steps of a batch in which nobody may run

HELD_STATES = {HoldKind.PAUSE: RequestState.PAUSED, HoldKind.PARK: RequestState.PARKED}


class LayerwiseSchedulerMixin(RecoverySchedulerMixin, EvenflowSchedulerMixin):
    """Owns the KV blocks of all requests, layer group by layer group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        self.kv_options = KVOptions.of(config)
        check_supported(config)
        manager: Any = self.kv_cache_manager  # type: ignore[attr-defined]
        self._coordinator = LayerwiseCoordinator.install(
            manager, max_in_flight_tokens=config.max_in_flight_tokens
        )
        self.block_owner = self._make_owner(manager)
        self.transfers = TransferPlanner(
            self.block_owner,
            num_ranks=config.parallel_config.world_size,
            max_mirrored_blocks_per_step=self.kv_options.max_mirrored_blocks_per_step,
        )
        self.recovery = Recovery(self.block_owner, self.transfers)
        self.capacity_guard = CapacityGuard(
            self.block_owner,
            self.transfers,
            max_staging=self.kv_options.max_staging_buffers,
            restore_when_free_frac=self.kv_options.restore_when_free_frac,
        )
        self.holds = Holds(clock=time.monotonic, max_hold_s=self.kv_options.max_pause_s)
        self.num_unknown_ids = 0  # in calls about requests that are gone, since the start
        self._stopped: set[str] = set()  # running requests that vLLM was told to skip
        self._wake = threading.Event()
        self._coordinator.owner = self.block_owner
        self._coordinator.draft = self._draft
        connector: Any = self.connector  # type: ignore[attr-defined]
        assert isinstance(connector, LayerwiseConnector)
        connector.planner = self.transfers
        connector.holds = self.holds
        connector.bind_kv_cache_manager(manager)

    def _make_owner(self, manager: Any) -> BlockOwner:
        config = manager.kv_cache_config
        geometry = BlockGeometry(
            num_groups=len(config.kv_cache_groups),
            block_size=config.kv_cache_groups[0].kv_cache_spec.block_size,
        )
        num_slots = num_host_slots(self.kv_options, config)
        most = geometry.num_groups * (manager.max_model_len // geometry.block_size)
        if num_slots < most and most > manager.block_pool.num_gpu_blocks - 1:
            raise ValueError(
                f"host_bytes={self.kv_options.host_bytes} holds {num_slots} blocks; a request of "
                f"max_model_len={manager.max_model_len} that does not fit the pool needs {most}"
            )
        return BlockOwner(
            manager.block_pool,
            HostPool(num_slots, num_ready=None if are_slots_ready_at_start(self.kv_options) else 0),
            geometry,
            orders=StepOrders(),
            poison_freed=self.kv_options.poison,
        )

    # -- each step --------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.transfers.settle()
        self._coordinator.discard_drafts()
        self._stop_held()
        self.adjust_placements()
        output = super().schedule(*args, **kwargs)
        if self._stopped and not output.num_scheduled_tokens:
            self._wake.wait(IDLE_WAIT_S)
        self._wake.clear()
        # Otherwise vLLM would call the connector after the layers have run.
        output.has_sync_kv_loads = True
        return output

    def adjust_placements(self) -> None:
        """Let the capacity guard make room for the next step and the next admission."""
        waiting: Any = self.waiting  # type: ignore[attr-defined]
        self.capacity_guard.adjust(
            self._running_needs(), [self._need(r) for r in itertools.islice(waiting, 1)]
        )

    def place(self, request_id: str, placement: LayerPlacement) -> None:
        """Say where a request's layer groups belong, from the next step on."""
        self.capacity_guard.give(request_id, placement)

    # -- holding requests back --------------------------------------------------------------

    def pause(self, request_id: str) -> None:
        """Let a request keep its place, and not run; others may take its blocks meanwhile.

        Like `park` and `resume`: holds from the next step on, idempotent; an id that is not known
        any more is counted and ignored. A hold ends by itself after `max_pause_s`.
        """
        if self._knows(request_id):
            self.holds.pause(request_id)

    def park(self, request_id: str) -> None:
        """Send a request back to the queue with its KV on the host, until `resume`."""
        if self._knows(request_id):
            self.holds.park(request_id)

    def resume(self, request_id: str) -> None:
        """Let a paused or parked request run again as soon as there is room."""
        if self._knows(request_id):
            self.holds.release(request_id)
            self._wake.set()

    @property
    def paused(self) -> frozenset[str]:
        return self.holds.ids(HoldKind.PAUSE)

    @property
    def parked(self) -> frozenset[str]:
        return self.holds.ids(HoldKind.PARK)

    def _knows(self, request_id: str) -> bool:
        known = request_id in self.requests  # type: ignore[attr-defined]
        self.num_unknown_ids += not known
        return known

    def _stop_held(self) -> None:
        """Tell vLLM which running requests to skip."""
        self.holds.release_overdue()
        for request in self.running:  # type: ignore[attr-defined]
            request_id = request.request_id
            if request_id in self.holds:
                self._stopped.add(request_id)
                request.next_decode_eligible_step = NEVER
            # Its last token is known first: the next step must not look for it in the last one.
            elif request_id in self._stopped and request.num_in_flight_tokens == 0:
                self._stopped.discard(request_id)
                request.next_decode_eligible_step = 0

    def _running_needs(self) -> list[Need]:
        return [self._need(request) for request in self.running]  # type: ignore[attr-defined]

    @staticmethod
    def _need(request: Request) -> Need:
        return Need(request_id=request.request_id, num_tokens=request.num_tokens)

    def _draft(self, request_id: str, num_tokens: int) -> RequestKV:
        """Draft a request that asks for its first blocks."""
        request: Request = self.requests[request_id]  # type: ignore[attr-defined]
        need = Need(request_id=request_id, num_tokens=max(num_tokens, request.num_tokens))
        placement = self.capacity_guard.place_new(need, self._running_needs())
        return self.block_owner.draft(
            request_id,
            placement,
            num_slots=self._num_predicted_slots(request),
            may_mirror=self.recovery.ledger.may_mirror(request_id),
        )

    def _num_predicted_slots(self, request: Request) -> int:
        geometry = self.block_owner.geometry
        num_left = max(0, request.max_tokens - request.num_output_tokens)
        num_tokens: int = min(
            request.num_tokens + min(num_left, self.kv_options.predicted_output_tokens),
            self.max_model_len,  # type: ignore[attr-defined]
        )
        return geometry.num_groups * (num_tokens // geometry.block_size)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.capacity_guard.forget(request.request_id)
        self.holds.release(request.request_id)
        self.recovery.ledger.forget(request.request_id)
        self._stopped.discard(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def state_of(self, request: Request) -> RequestState:
        kind = self.holds.kind(request.request_id)
        return super().state_of(request) if kind is None else HELD_STATES[kind]

    def layer_groups_of(self, request: Request) -> list[GroupKV]:
        kv = self.block_owner.requests.get(request.request_id)
        return [] if kv is None else kv.groups

    def check_integrity(self) -> None:
        """Raise AssertionError if a block or host slot is lost, or owned twice."""
        super().check_integrity()
        deferred: Any = self.deferred_frees  # type: ignore[attr-defined]
        self.block_owner.check_integrity(sum(len(blocks) for _, blocks in deferred))


class LayerwiseScheduler(LayerwiseSchedulerMixin, Scheduler):  # type: ignore[misc]
    """The synchronous one."""


class AsyncLayerwiseScheduler(LayerwiseSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
    """The one that schedules a step ahead of the model."""
