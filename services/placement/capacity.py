"""How many pool blocks a placement needs, with what is in transit, and by OrbitFlow's Eq. 1."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.placement.blocks import BlockGeometry, Residency, num_request_blocks
from services.placement.patterns import Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """KV of one request at one moment."""

    num_tokens: int  # >= 0
    block_size: int  # tokens, >= 1
    num_groups: int  # layer groups, >= 1
    num_extra_blocks: int = 0  # per offloaded group: being sealed, or of the running prefill chunk

    @property
    def num_full_blocks(self) -> int:
        """Blocks per group that are full, so can be in host memory."""
        return self.num_tokens // self.block_size

    @property
    def num_open_blocks(self) -> int:
        """1 if the last block of a group is not full: it stays in the pool; else 0."""
        return int(self.num_tokens % self.block_size > 0)


def blocks_needed(demand: Demand, *, num_offloaded: int, num_buffers: int) -> int:
    """Return the pool blocks of one request: `blocks.num_request_blocks` and the extra ones."""
    geometry = BlockGeometry(num_groups=demand.num_groups, block_size=demand.block_size)
    residency = Residency(num_offloaded=num_offloaded, num_staging=num_buffers)
    own = num_request_blocks(geometry, residency, num_tokens=demand.num_tokens)
    return own + num_offloaded * demand.num_extra_blocks


def blocks_while_restoring(demand: Demand, *, present: Pattern, target: Pattern) -> int:
    """Return the pool blocks of one request while it moves from `present` to `target`.

    A layer that comes back keeps its staging until its own blocks are filled, so a request whose
    buffers shrink needs the difference until then.
    """
    needed = blocks_needed(
        demand, num_offloaded=target.num_offloaded, num_buffers=target.num_buffers
    )
    comes_back = not set(present.offloaded) <= set(target.offloaded)
    spare = max(0, present.num_buffers - target.num_buffers)
    return needed + (spare * demand.num_full_blocks if comes_back else 0)


def eq1_blocks(num_groups: int, placed: Sequence[tuple[Pattern, int]]) -> int:
    """Return the blocks of OrbitFlow's Eq. 1 for (pattern, blocks per layer) of each request.

    Resident blocks plus one shared buffer, as large as the largest demand of any one layer.
    """
    resident = sum((num_groups - pattern.num_offloaded) * blocks for pattern, blocks in placed)
    buffer = max(
        sum(blocks for pattern, blocks in placed if layer in pattern.offloaded)
        for layer in range(num_groups)
    )
    return resident + buffer


def prefill_reread_blocks(num_prompt_tokens: int, chunk_tokens: int, block_size: int) -> int:
    """Return the blocks per offloaded group that a chunked prefill copies back, over all chunks.

    Each chunk after the first attends to all earlier ones, so it needs their KV again.
    """
    starts = range(chunk_tokens, num_prompt_tokens, chunk_tokens)
    return sum(start // block_size for start in starts)
