"""`Engine` on a layer-wise scheduler of vLLM's."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.v1.request import Request

from services.control.measures.link_rate import LinkRate
from services.control.prefixes.anchors import Anchor, ComingTurn
from services.control.prefixes.prefix_cache import Column
from services.control.prefixes.shared_prefixes import Stretch, behind
from services.control.requests.life import State
from services.control.requests.request_record import RequestRecord
from services.control.room.capacity_guard import CapacityGuard, Need
from services.control.types import Links
from services.executor.blocks.failures import may_mirror
from services.executor.blocks.residency import RequestKV
from services.executor.blocks.transfers.transfers import Transfers
from services.executor.kv_options import KVOptions, max_num_active_seqs
from services.executor.scheduler.engine_requests import EngineRequests
from services.executor.scheduler.vllm_scheduler import VllmScheduler
from services.executor.sizing import block_geometry, offloadable_groups
from services.executor.step_messages import CHUNK_BYTES
from services.placement.blocks import side_copy_blocks
from services.placement.types import EngineShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class VllmEngine(EngineRequests):
    """Reads the scheduler and its blocks, and gives them orders."""

    def __init__(
        self,
        scheduler: VllmScheduler,
        transfers: Transfers,
        guard: CapacityGuard[RequestKV],
        shape: EngineShape,
    ) -> None:
        super().__init__(scheduler, transfers.owner.records)
        self._transfers, self._guard = transfers, guard
        self._owner, self._options = transfers.owner, KVOptions.of(scheduler.vllm_config)
        self._shape = shape

    @property
    def shape(self) -> EngineShape:
        """Its sizes. Of the host those slots count that can be used by now."""
        shape, num_ready = self._shape, self._owner.host.num_ready
        if num_ready != shape.num_host_blocks:
            self._shape = shape = replace(shape, num_host_blocks=num_ready)
        return shape

    # -- its requests ------------------------------------------------------------------------

    def need_of(self, request: Request) -> Need[RequestKV]:
        record = self._owner.records[request.request_id]
        num_tokens = request.num_tokens + request.num_output_placeholders
        if not self._owner.geometry.side_windows:
            return Need(record, num_tokens)
        num_processed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        if record.kv is not None:  # one in the queue has computed nothing, and may have copies
            num_processed = max(num_processed, record.kv.num_side_tokens)
        return Need(record, num_tokens, num_processed_tokens=num_processed)

    def park(self, record: RequestRecord[RequestKV]) -> None:
        """It leaves as soon as no token of it is in flight; what has no copy is computed again.

        Where groups keep a window or a state it waits for copies of all that it has.
        """
        if record.state is State.RUNNING or record.state is State.PAUSED:
            record.enter(State.LEAVING)
            self._owner.counters.num_parks += 1

    # -- their KV ----------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        # What the guard keeps free before a layer comes back is not the planner's to give away,
        # nor what groups will take that no placement moves.
        num_free = self._owner.blocks.num_free - self._guard.num_spare
        if self._owner.geometry.side_windows:
            num_free -= sum(
                self._owner.sides.num_to_come(
                    one.request_id,
                    num_tokens=one.num_tokens + 1 + self._shape.max_ahead_tokens,
                )
                for one in self.running
            )
        return max(0, num_free)

    @property
    def num_write_through_blocks(self) -> int:
        return self._options.max_mirrored_blocks_per_step

    def num_predicted_slots(self, request: Request) -> int:
        geometry = self._owner.geometry
        num_left = max(0, request.max_tokens - request.num_output_tokens)
        num_tokens: int = min(
            request.num_tokens + min(num_left, self._options.predicted_output_tokens),
            self._scheduler.max_model_len,
        )
        num_full = geometry.num_groups * (num_tokens // geometry.block_size)
        return num_full + side_copy_blocks(geometry, num_tokens=num_tokens)

    def cached_prefix(self, request: Request) -> Sequence[Column]:
        if not (num_keys := self._num_keys(request)):
            return ()
        record = self._owner.records[request.request_id]
        columns = self._owner.trunks.find(record.prefix, request.block_hashes, num_keys)
        return self._anchored(request, columns)[0]

    def _anchored(
        self, request: Request, columns: Sequence[Column]
    ) -> tuple[Sequence[Column], Anchor | None]:
        """Return the columns that a request may begin with, and the anchor behind them, if any is
        needed there.
        """
        if not self._owner.side_copies.are_needed:
            return columns, None
        num_columns, anchor = self._transfers.turn_ends.find(columns, request.all_token_ids)
        return columns[:num_columns], anchor

    def coming_prefix(self, request: Request) -> Stretch | None:
        return self._coming(request, self.cached_prefix(request))

    def coming_turn(self, request: Request) -> ComingTurn | None:
        ends, num_keys = self._transfers.turn_ends, self._num_keys(request)
        if not ends.is_busy or not num_keys:
            return None
        keys = request.block_hashes[:num_keys]
        if ends.coming(keys, request.all_token_ids, num_found=0) is None:
            return None
        record = self._owner.records[request.request_id]
        columns = self._owner.trunks.find(record.prefix, request.block_hashes, num_keys)
        _, anchor = self._anchored(request, columns)
        num_found = 0 if anchor is None else anchor.copy.num_tokens
        turn = ends.coming(keys, request.all_token_ids, num_found=num_found)
        num_queued = self._transfers.write_through.num_under_way
        return turn and replace(turn, num_blocks=turn.num_blocks + num_queued)

    def _coming(self, request: Request, cached: Sequence[Column]) -> Stretch | None:
        end = self._num_keys(request)
        return self._owner.publishing.coming(request.block_hashes, first=len(cached), end=end)

    def _num_keys(self, request: Request) -> int:
        """Return with how many blocks a request may begin that others computed."""
        record, num_tokens = self._owner.records[request.request_id], request.num_tokens
        if request.skip_reading_prefix_cache or not may_mirror(record):
            return 0
        # It has no hashes any more if it has lost its KV.
        num_hashes = len(request.block_hashes)
        return min(num_hashes, int(num_tokens - 1) // self._owner.geometry.block_size)

    def stretches(self, request: Request) -> Sequence[Stretch]:
        record = self._owner.records[request.request_id]
        kv = record.kv
        if kv is not None:
            return self._owner.trunks.stretches(kv)
        if record.way is not None:  # one that is to be computed begins with nothing
            return ()
        cached = self.cached_prefix(request)
        return behind(self._owner.trunks.found(cached), self._coming(request, cached))

    def num_to_share(self, request: Request) -> int:
        kv = self._owner.records[request.request_id].kv
        if kv is not None:
            return self._owner.trunks.num_to_share(kv)
        cached = self.cached_prefix(request)
        coming = self._coming(request, cached)
        return self._owner.trunks.num_shared(cached) if coming is None else coming.end

    def adopt_prefix(self, request: Request, columns: Sequence[Column]) -> None:
        record = self._owner.records[request.request_id]
        _, anchor = self._anchored(request, columns)
        self._owner.adopt_prefix(record, columns, request.block_hashes)
        if anchor is not None:
            assert record.kv is not None
            self._transfers.turn_ends.begin_with(record.kv, anchor)

    # -- copies ------------------------------------------------------------------------------

    def links(self, h2d: LinkRate, d2h: LinkRate) -> Links:
        leaving_bytes = self.shape.block_bytes * sum(
            group.num_saves_sent - group.num_host_blocks
            for holder in self._owner.holders()
            for group in holder.groups
        )
        return Links(
            h2d=h2d.link(chunk_bytes=CHUNK_BYTES, num_queued_bytes=self.num_returning_bytes()),
            d2h=d2h.link(chunk_bytes=CHUNK_BYTES, num_queued_bytes=leaving_bytes),
        )

    def num_returning_bytes(self) -> int:
        return self._transfers.num_restoring_blocks() * self.shape.block_bytes

    def num_step_load_blocks(self, needs: Sequence[Need[RequestKV]]) -> int:
        return self._transfers.num_step_load_blocks()


def engine_shape(
    config: "VllmConfig", cache: "KVCacheConfig", *, num_blocks: int, num_host_blocks: int
) -> EngineShape:
    """Return what does not change while the engine runs. `num_blocks`: that requests can use."""
    parallel, scheduler, model = (
        config.parallel_config,
        config.scheduler_config,
        config.model_config,
    )
    groups, geometry = offloadable_groups(cache), block_geometry(config, cache)
    spec = groups[0].kv_cache_spec
    num_layers: int = sum(len(group.layer_names) for group in groups)
    num_layers *= parallel.pipeline_parallel_size  # the groups are of one stage
    layers_per_group = -(-num_layers // len(groups))
    return EngineShape(
        num_layers=num_layers,
        layers_per_group=layers_per_group,
        block_size=geometry.block_size,
        num_blocks=num_blocks,
        block_bytes=spec.page_size_bytes * layers_per_group * parallel.tensor_parallel_size,
        max_num_seqs=max_num_active_seqs(config),
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        num_host_blocks=num_host_blocks,
        max_model_len=model.max_model_len,
        max_prefill_chunk_tokens=scheduler.long_prefill_token_threshold
        or scheduler.max_num_batched_tokens,
        side_windows=geometry.side_windows,
        side_block_size=geometry.side_block_size,
        max_in_flight_tokens=geometry.max_in_flight_tokens,
        max_ahead_tokens=geometry.max_ahead_tokens,
    )
