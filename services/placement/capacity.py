"""How many pool blocks a placement needs, with what is in transit."""

from dataclasses import dataclass

from services.placement.blocks import BlockGeometry, Residency, num_request_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """KV of one request at one moment."""

    num_tokens: int  # >= 0
    block_size: int  # tokens, >= 1
    num_groups: int  # layer groups, >= 1
    num_extra_blocks: int = 0  # per offloaded group: being sealed, or of the running prefill chunk
    num_ahead: int = 0  # tokens behind `num_tokens` that have room: drafts

    @property
    def num_full_blocks(self) -> int:
        """Blocks per group that are full, so can be in host memory."""
        return self.num_tokens // self.block_size

    @property
    def num_open_blocks(self) -> int:
        """Blocks per group that are not full, so stay in the pool: 1 at most without drafts."""
        return -(-(self.num_tokens + self.num_ahead) // self.block_size) - self.num_full_blocks


def blocks_needed(demand: Demand, *, num_offloaded: int, num_buffers: int) -> int:
    """Return the pool blocks of one request: `blocks.num_request_blocks` and the extra ones."""
    geometry = BlockGeometry(num_groups=demand.num_groups, block_size=demand.block_size)
    residency = Residency(num_offloaded=num_offloaded, num_staging=num_buffers)
    own = num_request_blocks(
        geometry, residency, num_tokens=demand.num_tokens, num_ahead=demand.num_ahead
    )
    return own + num_offloaded * demand.num_extra_blocks


def prefill_reread_blocks(num_prompt_tokens: int, chunk_tokens: int, block_size: int) -> int:
    """Return the blocks per offloaded group that a chunked prefill copies back, over all chunks.

    Each chunk after the first attends to all earlier ones, so it needs their KV again.
    """
    starts = range(chunk_tokens, num_prompt_tokens, chunk_tokens)
    return sum(start // block_size for start in starts)
