"""vLLM's schedulers with layer-wise KV.

Before each step: what the ranks completed is settled, and the capacity guard moves layer groups.
Then vLLM schedules as it always does, asking the coordinator for blocks.
"""

import time
from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from services.executor.blocks.block_owner import BlockOwner
from services.executor.blocks.host_pool import HostPool
from services.executor.blocks.residency import GroupKV, RequestKV
from services.executor.blocks.step_orders import StepOrders
from services.executor.blocks.transfer_planner import TransferPlanner
from services.executor.kv_options import KVOptions, check_supported
from services.executor.observation import RequestState
from services.executor.plugin.connector import LayerwiseConnector
from services.executor.scheduler.capacity_guard import CapacityGuard, Need
from services.executor.scheduler.coordinator import LayerwiseCoordinator
from services.executor.scheduler.holds import HoldKind, Holds
from services.executor.scheduler.recovery import Recovery, RecoverySchedulerMixin
from services.executor.scheduler.run_control import RunControl, need_of
from services.executor.scheduler.scheduler import EvenflowSchedulerMixin
from services.executor.sizing import are_slots_ready_at_start, block_bytes, num_host_slots
from services.executor.stats.rates import Rates, write_budget_blocks
from services.placement.blocks import BlockGeometry
from services.placement.layer_placement import LayerPlacement

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
        self._block_bytes = block_bytes(self.kv_options, manager.kv_cache_config)
        self.rates = Rates()
        holds = Holds(
            self.block_owner.counters,
            clock=time.monotonic,
            max_hold_s=self.kv_options.max_pause_s,
        )
        self.transfers = TransferPlanner(
            self.block_owner,
            num_ranks=config.parallel_config.world_size,
            write_budget=self._write_budget,
            count_held=holds.count,
        )
        self.recovery = Recovery(self.block_owner, self.transfers)
        self.capacity_guard = CapacityGuard(
            self.block_owner,
            self.transfers,
            max_staging=self.kv_options.max_staging_buffers,
            restore_when_free_frac=self.kv_options.restore_when_free_frac,
        )
        self.control = RunControl(
            self,
            holds,
            rates=self.rates,
            block_bytes=self._block_bytes,
            overlap=self.kv_options.overlap_load_evict,
        )
        self._coordinator.owner = self.block_owner
        self._coordinator.draft = self._draft
        connector: Any = self.connector  # type: ignore[attr-defined]
        assert isinstance(connector, LayerwiseConnector)
        connector.planner = self.transfers
        connector.limit_host = self._limit_host
        connector.relieve = self.capacity_guard.relieve
        connector.num_host_tokens = self.control.num_host_tokens
        connector.rates = self.rates
        connector.bind_kv_cache_manager(manager)

    def _make_owner(self, manager: Any) -> BlockOwner:
        config = manager.kv_cache_config
        geometry = BlockGeometry(
            num_groups=len(config.kv_cache_groups),
            block_size=config.kv_cache_groups[0].kv_cache_spec.block_size,
        )
        num_slots = num_host_slots(self.kv_options, config)
        owner = BlockOwner(
            manager.block_pool,
            HostPool(num_slots, num_ready=None if are_slots_ready_at_start(self.kv_options) else 0),
            geometry,
            orders=StepOrders(),
            poison_freed=self.kv_options.poison,
        )
        self._check_room(owner, num_slots)
        return owner

    def _limit_host(self, num_slots: int) -> None:
        """Use no more host slots than every rank has; ValueError if that is too few."""
        self._check_room(self.block_owner, num_slots)
        self.block_owner.host.limit(num_slots)

    def _check_room(self, owner: BlockOwner, num_slots: int) -> None:
        """Raise ValueError if a request of the maximum length would never find room."""
        max_model_len: int = self.max_model_len  # type: ignore[attr-defined]
        most = owner.geometry.num_groups * (max_model_len // owner.geometry.block_size)
        if num_slots < most and most > owner.pool.num_gpu_blocks - 1:
            raise ValueError(
                f"host_bytes={self.kv_options.host_bytes} holds {num_slots} blocks; a request of "
                f"max_model_len={max_model_len} that does not fit the pool needs {most}"
            )

    # -- each step --------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.transfers.settle()
        self._coordinator.discard_drafts()
        self.control.stop_and_start()
        self.adjust_placements()
        self.control.prepare_resumes(self._num_predicted_slots)
        output = super().schedule(*args, **kwargs)
        self.control.resumes.admitted(self._resumed(output))
        self.control.after_step(num_scheduled=output.total_num_scheduled_tokens)
        # Otherwise vLLM would call the connector after the layers have run.
        output.has_sync_kv_loads = True
        return output

    def adjust_placements(self) -> None:
        """Let the capacity guard make room for the next step and the next admission."""
        self.capacity_guard.adjust(
            self.control.active_needs(), [need_of(r) for r in self.control.next_in_line()]
        )

    def _resumed(self, output: SchedulerOutput) -> list[str]:
        """Return the requests that run again after a preemption."""
        requests: Any = self.requests  # type: ignore[attr-defined]
        new = [r.req_id for r in output.scheduled_new_reqs if requests[r.req_id].num_preemptions]
        return [*output.scheduled_cached_reqs.resumed_req_ids, *new]

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, *args)
        num_tokens = scheduler_output.num_scheduled_tokens.values()
        self.rates.note_step(
            self.step_clock.last_step_s,
            num_tokens=sum(num_tokens),
            num_prefill_tokens=sum(n for n in num_tokens if n > 1),
        )
        return outputs

    def _write_budget(self, num_under_way: int) -> int:
        return write_budget_blocks(
            self.rates,
            block_bytes=self._block_bytes,
            max_blocks=self.kv_options.max_mirrored_blocks_per_step,
            num_under_way=num_under_way,
        )

    def place(self, request_id: str, placement: LayerPlacement) -> None:
        """Say where a request's layer groups belong, from the next step on.

        An id that is not known any more is counted and ignored.
        """
        if self.control.knows(request_id):
            self.capacity_guard.give(request_id, placement)

    # -- holding requests back --------------------------------------------------------------

    def pause(self, request_id: str) -> None:
        """Let a request keep its place, and not run; others may take its blocks meanwhile.

        Like `park` and `resume`: holds from the next step on, idempotent; an id that is not known
        any more is counted and ignored. A hold ends by itself after `max_pause_s`.
        """
        self.control.pause(request_id)

    def park(self, request_id: str) -> None:
        """Send a request back to the queue with its KV on the host, until `resume`."""
        self.control.park(request_id)

    def resume(self, request_id: str) -> None:
        """Let a paused or parked request run again as soon as there is room."""
        self.control.resume(request_id)

    def hold_back(self, request_id: str, *, held: bool) -> None:
        if held:
            self.pause(request_id)
        else:
            self.resume(request_id)

    def set_deposits(self, num_tokens: Mapping[str, int]) -> None:
        """Say how many tokens each reader has in hand: who has most is mirrored first."""
        self.transfers.write_through.set_deposits(num_tokens)

    @property
    def paused(self) -> frozenset[str]:
        return self.control.holds.ids(HoldKind.PAUSE)

    @property
    def parked(self) -> frozenset[str]:
        return self.control.holds.ids(HoldKind.PARK)

    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        """Keep the host copies, unless tokens that are under way will be drawn anew.

        Nor does a request keep them whose prompt must be computed whole, for its log-probabilities.
        """
        begins_anew = drop_stale_output or request.skip_reading_prefix_cache
        self._coordinator.parking = None if begins_anew else request.request_id
        super()._preempt_request(request, timestamp, drop_stale_output)  # type: ignore[misc]
        self._coordinator.parking = None
        self.control.preempted(request)

    # -- requests ---------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        # vLLM hashes the blocks of every request wherever there is a connector; nobody asks here.
        request._block_hasher = None
        super().add_request(request)

    def _draft(self, request_id: str, num_tokens: int) -> RequestKV:
        """Draft a request that asks for its first blocks."""
        request: Request = self.requests[request_id]  # type: ignore[attr-defined]
        need = Need(request_id=request_id, num_tokens=max(num_tokens, request.num_tokens))
        placement = self.capacity_guard.place_new(need, self.control.active_needs())
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
        self.control.forget(request.request_id)
        self.recovery.ledger.forget(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def state_of(self, request: Request) -> RequestState:
        kind = self.control.holds.kind(request.request_id)
        return super().state_of(request) if kind is None else HELD_STATES[kind]

    def layer_groups_of(self, request: Request) -> list[GroupKV]:
        kv = self.block_owner.requests.get(request.request_id)
        return [] if kv is None else kv.groups

    def check_integrity(self) -> None:
        """Raise AssertionError if a block or host slot is lost, or owned twice."""
        super().check_integrity()
        deferred: Any = self.deferred_frees  # type: ignore[attr-defined]
        self.control.check_integrity()
        self.block_owner.check_integrity(sum(len(blocks) for _, blocks in deferred))


class LayerwiseScheduler(LayerwiseSchedulerMixin, Scheduler):  # type: ignore[misc]
    """The synchronous one."""


class AsyncLayerwiseScheduler(LayerwiseSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
    """The one that schedules a step ahead of the model."""
