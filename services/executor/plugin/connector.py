"""The KV connector: where vLLM calls us around steps and layers.

vLLM makes one in the scheduler's process and one in every worker. The scheduler's hands over to
`Transfers`; the worker's puts a rank's copies together when the KV memory is there
(`register_kv_caches`), and hands over to `TransferRunner`. In a step vLLM calls, on the scheduler's
side, `get_num_new_matched_tokens` of requests that wait, `has_pending_block_frees` where blocks
are missing, `build_connector_meta`; on a rank `start_load_kv`, around each layer
`wait_for_layer_load` and `save_kv_layer`, then `wait_for_save` and `build_connector_worker_meta`.
What the last one returns, the scheduler hands to `Transfers` itself, before it looks at the
step's tokens.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput

from services.control.measures.step_timing import LinkCalibration
from services.executor.blocks.transfers.transfers import Transfers
from services.executor.copies.backend import make_backend, make_guard
from services.executor.copies.copy_watch import Patience
from services.executor.copies.pages import blocks_per_chunk, fill, view_pools
from services.executor.copies.timing.layer_clock import LayerClock
from services.executor.copies.timing.link_calibration import calibrate
from services.executor.copies.timing.rank_stats import RankStats
from services.executor.copies.timing.step_marks import StepMarks
from services.executor.copies.transfer_runner import TransferRunner, group_of_layers
from services.executor.kv_options import KVOptions
from services.executor.sizing import num_affordable_slots, num_host_slots, offloadable_groups
from services.executor.stats.kv_metrics import KVPromMetrics
from services.executor.stats.kv_stats import KVStats
from services.executor.step_messages import CHUNK_BYTES, HostRoom, StepFeedback, StepTransfers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class LayerwiseConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Carries a step's transfers from the scheduler to the layers, and feedback back."""

    transfers: Transfers  # scheduler side; set by the scheduler, as are the next four
    limit_host: Callable[[int], None]
    relieve: Callable[[], bool]
    num_host_tokens: "Callable[[Request], int | None]"
    num_accepted: Callable[[str, int], int]
    calibration: LinkCalibration | None = None  # of all ranks, while the link was idle
    runner: TransferRunner  # worker side; made when the KV memory is there

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.options = KVOptions.of(vllm_config)
        groups = offloadable_groups(kv_cache_config)
        self._groups = [list(group.layer_names) for group in groups]
        self._first_layers, self._last_layers = group_of_layers(self._groups)
        self._hooks_layers = False  # in this step
        self._is_in_step = False
        # Whether layers call the hooks in every step, and not only in those that need it: for
        # tools that time or slow down layers.
        self.watches_layers = False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Full graphs leave out the hooks: the worker keeps them from steps that need those."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """Ask for blocks that are one run of bytes, layer by layer: pages are copied as a whole.

        Where a backend has no such layout, vLLM takes another with a warning; one whose blocks are
        not dense is refused when pages are mapped.
        """
        return None if current_platform.is_cpu() else "LBNHC"

    @property
    def requires_kv_delivery(self) -> bool:
        """A preempted request keeps the host copies that are complete: nothing is handed off."""
        return False

    # -- scheduler side ---------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens that a parked request has on the host; None: vLLM passes over it."""
        return self.num_host_tokens(request), False

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        pass

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def has_pending_block_frees(self) -> bool:
        """Make the scheduler wait for copies under way rather than preempt.

        It asks when a running request found no block.
        """
        return self.relieve()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        num_computed = {
            new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs
        }
        cached = scheduler_output.scheduled_cached_reqs
        num_computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        num_tokens_after = {
            request_id: self.num_accepted(request_id, num_computed[request_id] + num_tokens)
            for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items()
        }
        return self.transfers.plan_step(num_tokens_after)

    def reset_cache(self) -> bool:
        """Forget all KV of requests in the queue: the weights may have changed."""
        self.transfers.drop_all_waiting()
        return True

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], HostRoom]
    ) -> None:
        """Take in the room and the link that every rank, by (pipeline, tensor) rank, has."""
        measured = [room.calibration for room in metadata.values() if room.calibration]
        self.calibration = reduce(LinkCalibration.aggregate, measured) if measured else None
        self.limit_host(min(room.num_slots for room in metadata.values()))

    # -- worker side ------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        options, config = self.options, self._kv_cache_config
        pools = view_pools(kv_caches, self._groups, num_blocks=config.num_blocks)
        num_sides = len(config.kv_cache_groups) - len(pools)
        pools += [pools[0]] * num_sides  # all groups alias one pool
        num_slots = num_host_slots(self._vllm_config, config)
        num_slots = num_affordable_slots(self._vllm_config, config, num_slots)
        self._backend = make_backend(options, pools, num_slots=num_slots)
        pages = self._backend.pages
        guard = make_guard(options, self._backend, num_slots=num_slots)
        self.runner = TransferRunner(
            guard or self._backend.engine,
            len(self._groups),
            num_side_groups=num_sides,
            patience=Patience.of(options, block_bytes=pages[0].block_bytes),
            late_guard=guard,
        )
        self._backend.host.pin_first_chunk()
        self._calibration = self._calibrate(pages[0].block_bytes)
        self._clock = self._make_clock()
        self._stats = RankStats(self.runner, self._vllm_config.parallel_config.rank)
        if options.poison:
            # Groups alias one pool, so that one group's pages are everybody's.
            self.runner.fill = lambda block_ids, nan: fill(pages[0], block_ids, nan=nan)

    def start_pinning(self) -> None:
        """Pin the rest of the host memory in the background: everything is captured."""
        self._backend.host.start_pinning()

    def get_handshake_metadata(self) -> HostRoom:
        return HostRoom(self._backend.host.num_slots, self._calibration)

    def _calibrate(self, block_bytes: int) -> LinkCalibration | None:
        num_ready = self._backend.host.num_ready_slots
        return calibrate(
            self._backend.engine,
            num_blocks=min(num_ready, self._kv_cache_config.num_blocks - 1),
            chunk_blocks=blocks_per_chunk(block_bytes),
        )

    def _make_clock(self) -> LayerClock:
        return LayerClock(
            self.runner,
            StepMarks(self._backend.engine),
            num_layers=sum(len(names) for names in self._groups),
            chunk_bytes=CHUNK_BYTES,
            calibration=self._calibration,
        )

    def has_connector_metadata(self) -> bool:
        """Tell vLLM whether this step's layers call the hooks below: not if nothing would happen.

        It asks at every layer; without loads and copies to the host the hooks do nothing.
        """
        return self._hooks_layers

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        transfers = self._get_connector_metadata()
        assert isinstance(transfers, StepTransfers)
        self._is_in_step = True
        self.runner.begin_step(transfers)
        self._hooks_layers = self.watches_layers or self.runner.has_work_between_layers
        # The second model runner replays a full graph outside of a forward context.
        if forward_context.attn_metadata is not None or kwargs.get("attn_metadata") is not None:
            self._clock.marks.layers_begin(transfers.step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        group = self._first_layers.get(layer_name)
        if group is not None:
            self.runner.before_group(group)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        group = self._last_layers.get(layer_name)
        if group is not None:
            self.runner.after_group(group)

    def finish_forward(self) -> None:
        """Take in that the layers have run; the first model runner does not say so."""
        self._clock.marks.layers_end()

    def wait_for_save(self) -> None:
        """Leave copies to the host running: blocks are kept until their copies are confirmed."""
        self._hooks_layers = self._is_in_step = False
        self.finish_forward()
        self.runner.end_step()

    def build_connector_worker_meta(self) -> StepFeedback | None:
        """Return what the step's copies have come to; None before `wait_for_save`.

        Where drafts are made, the first model runner asks while copies to the host have yet to
        begin, and ends the step behind the drafter: the worker asks again then.
        """
        if self._is_in_step:
            return None
        feedback = self.runner.feedback()
        feedback.num_ready_slots = self._backend.host.num_ready_slots
        feedback.timing = self._clock.take()
        return feedback

    def get_kv_connector_stats(self) -> KVStats | None:
        """Return what has happened since the last call, on either side."""
        if self._role == KVConnectorRole.SCHEDULER:
            return self.transfers.stats()
        return self._stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStats:
        return KVStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> KVPromMetrics:
        return KVPromMetrics(*args, **kwargs)

    def shutdown(self) -> None:
        if self._role == KVConnectorRole.WORKER and hasattr(self, "runner"):
            self._backend.close()

    def take_events(self) -> Iterable[Any]:
        return ()
