"""Where no KV leaves the pool: what vLLM's newcomers begin with, and how much must stay free."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.placement.types import EngineShape
from simulator.memory.requests import SimulatedRequest
from simulator.memory.shared_pool import Position, SharedPool


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """vLLM's options of the same names: what it lets in. Where KV leaves the pool they say nothing.

    `watermark`: share of the pool that a newcomer must leave free beside others, [0, 1).
    `scheduler_reserve_full_isl`: all its known tokens must have room, not only the next chunk's.
    """

    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True


class VllmPool:
    """The pool, and what is found in it."""

    def __init__(self, shape: EngineShape, options: VllmOptions, *, prefix_caching: bool) -> None:
        self.blocks = SharedPool(num_blocks=shape.num_blocks, num_groups=shape.num_groups)
        self.options = options
        self._caches, self._block_size = prefix_caching, shape.block_size
        num_positions = shape.num_blocks // shape.num_groups + 1  # vLLM keeps one for itself
        self._watermark_blocks = int(options.watermark * num_positions) * shape.num_groups

    def cached(self, request: SimulatedRequest) -> list[Position]:
        """Return where the KV of leading tokens is: not of the last one's block."""
        if not self._caches:
            return []
        numbers = range((request.num_tokens - 1) // self._block_size)
        key = request.spec.block_key
        return self.blocks.cached(key(number, self._block_size) for number in numbers)

    def publish(self, request: SimulatedRequest, before: int, after: int) -> None:
        """Let others find the blocks that are full with the tokens from `before` to `after`."""
        if self._caches:
            first, end = before // self._block_size, after // self._block_size
            keys = [request.spec.block_key(one, self._block_size) for one in range(first, end)]
            self.blocks.publish(request.request_id, first, keys)

    def num_kept_free(self, cached: Sequence[Position], *, beside_others: bool) -> int:
        """Return the free blocks that a newcomer's new ones cannot have."""
        num_kept = self._watermark_blocks if beside_others else 0
        return num_kept + self.blocks.num_free_of(cached)
