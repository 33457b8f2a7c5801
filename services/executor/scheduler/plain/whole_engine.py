"""`Engine` on vLLM's own blocks: no layer of a request leaves the pool without the others.

No copy of a request that leaves is counted on: it is computed again, but for what vLLM finds in its
cache. Groups whose KV does not grow with a request, windows and states, are side groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from services.control.measures.link_rate import LinkRate
from services.control.prefixes.anchors import ComingTurn
from services.control.prefixes.prefix_cache import Column
from services.control.prefixes.shared_prefixes import Stretch
from services.control.requests.life import State
from services.control.requests.request_record import RequestRecord
from services.control.room.capacity_guard import Need
from services.control.types import Links
from services.executor.blocks.residency import RequestKV
from services.executor.kv_options import max_num_active_seqs
from services.executor.scheduler.engine_requests import EngineRequests
from services.executor.scheduler.plain.common_prefixes import CommonPrefixes
from services.executor.scheduler.vllm_scheduler import VllmScheduler
from services.executor.sizing import side_window
from services.placement.blocks import STATE
from services.placement.types import EngineShape


class WholeEngine(EngineRequests):
    """Reads a scheduler of vLLM's, and sends requests away."""

    def __init__(
        self, scheduler: VllmScheduler, records: Mapping[str, RequestRecord[RequestKV]]
    ) -> None:
        super().__init__(scheduler, records)
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._growing = [one for one in managers if isinstance(one, FullAttentionManager)]
        self._fixed = [one for one in managers if one not in self._growing]
        self._prefixes = CommonPrefixes()
        self.shape = self._whole_shape()  # of the pool what can be had at the last look
        self._num_blocks = self.shape.num_blocks

    @property
    def can_plan(self) -> bool:
        """Whether requests take more of the pool the longer they are: else none needs to leave."""
        return bool(self._growing)

    def _whole_shape(self) -> EngineShape:
        scheduler = self._scheduler
        config, cache = scheduler.vllm_config, scheduler.kv_cache_manager.kv_cache_config
        pool: Any = scheduler.kv_cache_manager.block_pool
        first = (self._growing or self._fixed)[0]
        windows = [one.block_size for one in self._fixed if _window(one.kv_cache_spec) != STATE]
        return EngineShape(
            num_layers=max(1, len(self._growing)),  # a group is as one layer
            layers_per_group=1,
            block_size=first.block_size,
            num_blocks=pool.num_gpu_blocks - 1,  # one is vLLM's null block
            block_bytes=_block_bytes(cache) * config.parallel_config.tensor_parallel_size,
            max_num_seqs=max_num_active_seqs(config),
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            max_model_len=config.model_config.max_model_len,
            max_prefill_chunk_tokens=config.scheduler_config.long_prefill_token_threshold
            or config.scheduler_config.max_num_batched_tokens,
            side_windows=tuple(_window(one.kv_cache_spec) for one in self._fixed),
            side_block_size=windows[0] if windows else 0,
            max_in_flight_tokens=config.max_in_flight_tokens if self._fixed else 0,
        )

    def look(self) -> None:
        """Take in which requests are held: what they keep of the pool no other can have."""
        held = [one.request_id for one in self._scheduler.running if self._is_held(one)]
        num_kept = sum(_num_blocks(one, name) for one in self._fixed for name in held)
        num_kept += sum(len(one.req_to_blocks[name]) for one in self._growing for name in held)
        num_blocks = max(1, self._num_blocks - num_kept)
        if num_blocks != self.shape.num_blocks:
            self.shape = replace(self.shape, num_blocks=num_blocks)

    def _is_held(self, request: Request) -> bool:
        return bool(self._records[request.request_id].holds)

    # -- its requests ------------------------------------------------------------------------

    def need_of(self, request: Request) -> Need[RequestKV]:
        record = self._records[request.request_id]
        return Need(record, request.num_tokens + request.num_output_placeholders)

    def park(self, record: RequestRecord[RequestKV]) -> None:
        """It leaves as soon as no token of it is in flight."""
        if record.state is State.RUNNING or record.state is State.PAUSED:
            record.enter(State.LEAVING)

    def arrived(self, request: Request) -> None:
        """Take in a request and what it begins with; one that is here already changes nothing."""
        if not self._prefixes.knows(request.request_id):
            self._prefixes.add(request.request_id, tuple(request.block_hashes))

    def ended(self, request: Request) -> None:
        self._prefixes.remove(request.request_id)

    # -- their KV ----------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        pool: Any = self._scheduler.kv_cache_manager.block_pool
        return int(pool.get_num_free_blocks())

    @property
    def num_write_through_blocks(self) -> int:
        return 0

    def num_predicted_slots(self, _request: Request) -> int:
        return 0

    def cached_prefix(self, _request: Request) -> Sequence[Column]:
        return ()

    def coming_prefix(self, _request: Request) -> Stretch | None:
        return None

    def coming_turn(self, _request: Request) -> ComingTurn | None:
        return None

    def stretches(self, request: Request) -> Sequence[Stretch]:
        hashed, held = self._scheduler.hash_block_size, self.shape.block_size
        found = self._prefixes.stretches(request.request_id)
        return [one._replace(end=one.end * hashed // held) for one in found]

    def num_to_share(self, _request: Request) -> int:
        return 0

    def adopt_prefix(self, _request: Request, _columns: Sequence[Column]) -> None:
        raise AssertionError("there is no copy to begin with")

    # -- copies ------------------------------------------------------------------------------

    def links(self, h2d: LinkRate, d2h: LinkRate) -> Links:
        return Links(h2d=None, d2h=None)

    def num_returning_bytes(self) -> int:
        return 0

    def num_step_load_blocks(self, _needs: Sequence[Need[RequestKV]]) -> int:
        return 0


def _window(spec: Any) -> int:
    """Return how many tokens' KV a group keeps whose KV does not grow, or `STATE`."""
    window = side_window(spec)
    return STATE if window is None else window


def _num_blocks(manager: Any, request_id: str) -> int:
    """Return the blocks that a request has in one group: what has left a window is null."""
    row = manager.req_to_blocks.get(request_id, ())
    return sum(1 for _ in takewhile(lambda block: not block.is_null, reversed(row)))


def _block_bytes(cache: Any) -> int:
    """Return a block's bytes on one rank."""
    num_bytes: int = sum(tensor.size for tensor in cache.kv_cache_tensors)
    return max(1, num_bytes // int(cache.num_blocks))
