"""Where no KV leaves the pool: what vLLM's newcomers begin with, and how much must stay free."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from services.placement.types import EngineShape
from simulator.engine.offloading import HostTier
from simulator.memory.requests import SimulatedRequest
from simulator.memory.shared_pool import Position, SharedPool


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """vLLM's options of the same names: what it lets in. Where KV leaves the pool they say nothing.

    `watermark`: share of the pool that a newcomer must leave free beside others, [0, 1).
    `scheduler_reserve_full_isl`: all its known tokens must have room, not only the next chunk's.
    `offloading_connector`: of the host's memory, below the prefix cache (`offloading.py`), and of
    that `offload_prompt_only`: answers are not copied.
    """

    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True
    offloading_connector: bool = False
    offload_prompt_only: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """What a newcomer begins with: leading blocks of the pool, and the host's behind them."""

    cached: Sequence[Position] = ()
    on_host: Sequence[Hashable] = ()  # keys

    @property
    def num_blocks(self) -> int:
        return len(self.cached) + len(self.on_host)


NOTHING = Hit()


class VllmPool:
    """The pool, and what is found in it and below it."""

    def __init__(
        self,
        shape: EngineShape,
        options: VllmOptions,
        *,
        prefix_caching: bool,
        tier: HostTier | None = None,
    ) -> None:
        self.blocks = SharedPool(num_blocks=shape.num_blocks, num_groups=shape.num_groups)
        self.options, self.tier = options, tier
        self._caches, self._block_size = prefix_caching, shape.block_size
        self._num_groups = shape.num_groups
        num_positions = shape.num_blocks // shape.num_groups + 1  # vLLM keeps one for itself
        self._watermark_blocks = int(options.watermark * num_positions) * shape.num_groups

    def find(self, request: SimulatedRequest) -> Hit | None:
        """Return where the KV of leading tokens is: not of the last one's block.

        None: the request is passed over now, for what the host has of it is not ready.
        """
        if not self._caches:
            return NOTHING
        most = (request.num_tokens - 1) // self._block_size
        key = request.spec.block_key
        cached = self.blocks.cached(key(number, self._block_size) for number in range(most))
        if self.tier is None:
            return Hit(cached=cached)
        keys = [key(number, self._block_size) for number in range(len(cached), most)]
        on_host = self.tier.found(keys)
        return None if on_host is None else Hit(cached=cached, on_host=on_host)

    def is_loading(self, request: SimulatedRequest) -> bool:
        """Return whether a request waits for what it begins with."""
        return self.tier is not None and self.tier.is_loading(request.request_id)

    def begin(self, request: SimulatedRequest, hit: Hit) -> None:
        """Let a request without blocks have what was found; what is on the host is to come."""
        if hit.cached:
            self.blocks.begin_with(request.request_id, hit.cached)
        if self.tier is not None and hit.on_host:
            num_blocks = self._num_groups * hit.num_blocks
            taken = self.blocks.set_owned(request.request_id, num_blocks)
            assert taken, "there is room for it"
            self.tier.load(request, len(hit.cached), hit.on_host)

    def take_in_copies(self) -> None:
        """Let others find what has come back."""
        for load in self.tier.take_in_loads() if self.tier else ():
            self.blocks.publish(load.request.request_id, load.first, load.keys)

    def save(self, request: SimulatedRequest) -> None:
        """Copy to the host what the newest step has filled."""
        if self.tier is not None and self._caches:
            first, num_full = self.tier.num_offered(request.request_id), request.kv.num_full_blocks
            if self.options.offload_prompt_only:
                num_full = min(num_full, request.num_prompt_tokens // self._block_size)
            numbers = range(first, num_full)
            if keys := [request.spec.block_key(one, self._block_size) for one in numbers]:
                self.tier.save(request.request_id, keys)

    def ended(self, request: SimulatedRequest) -> None:
        if self.tier is not None:
            self.tier.ended(request.request_id)

    def publish(self, request: SimulatedRequest, before: int, after: int) -> None:
        """Let others find the blocks that are full with the tokens from `before` to `after`."""
        if self._caches:
            first, end = before // self._block_size, after // self._block_size
            keys = [request.spec.block_key(one, self._block_size) for one in range(first, end)]
            self.blocks.publish(request.request_id, first, keys)

    def num_kept_free(self, hit: Hit, *, beside_others: bool) -> int:
        """Return the free blocks that a newcomer's new ones cannot have."""
        num_kept = self._watermark_blocks if beside_others else 0
        num_loaded = self._num_groups * len(hit.on_host)
        return num_kept + num_loaded + self.blocks.num_free_of(hit.cached)
