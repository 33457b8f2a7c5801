"""KV memory as pages: one page is one block of one layer, as bytes.

A host slot holds the pages of one block for all layers of a group, so that each layer of a group
has a slab of its own, shared by the groups: slot i is the same row in each of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from services.executor.copies.streams import Layers
from services.executor.step_messages import CHUNK_BYTES

POISON_BYTE = 0xFF  # repeated, it is NaN in every floating-point format


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPages:
    """One layer group's pages."""

    pool: tuple[torch.Tensor, ...]  # per layer: [num_blocks, page_bytes] uint8, views of the KV
    host: tuple[torch.Tensor, ...]  # per layer: [num_slots, page_bytes] uint8
    # Of the above; asked for with each copy.
    block_bytes: int = field(init=False)  # of one block over the group's layers
    blocks_per_chunk: int = field(init=False)
    to_pool: Layers = field(init=False)
    to_host: Layers = field(init=False)

    def __post_init__(self) -> None:
        block_bytes = sum(pages.shape[1] for pages in self.pool)
        host = self.host[: len(self.pool)]
        object.__setattr__(self, "block_bytes", block_bytes)
        object.__setattr__(self, "blocks_per_chunk", blocks_per_chunk(block_bytes))
        object.__setattr__(self, "to_pool", Layers(host, self.pool))
        object.__setattr__(self, "to_host", Layers(self.pool, host))


def blocks_per_chunk(block_bytes: int) -> int:
    """Return how many blocks a chunk of a copy has, at least one."""
    return max(1, CHUNK_BYTES // block_bytes)


def view_pools(
    kv_caches: Mapping[str, torch.Tensor], groups: Sequence[Sequence[str]], *, num_blocks: int
) -> list[tuple[torch.Tensor, ...]]:
    """Return each group's pages in the pool, layer by layer. ValueError if blocks are not dense."""
    return [tuple(_as_pages(kv_caches[name], num_blocks) for name in names) for names in groups]


def page_sizes(pools: Sequence[Sequence[torch.Tensor]]) -> list[int]:
    """Return the bytes of a page for each slab that the groups share."""
    longest = max(pools, key=len)
    return [pages.shape[1] for pages in longest]


def pair_pages(
    pools: Sequence[Sequence[torch.Tensor]], slabs: Sequence[torch.Tensor]
) -> list[GroupPages]:
    """Return each group's pages with the host slabs behind them."""
    return [GroupPages(pool=tuple(pool), host=tuple(slabs[: len(pool)])) for pool in pools]


def _as_pages(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """View one layer's KV as `[num_blocks, page_bytes]`."""
    rows_per_block, remainder = divmod(cache.shape[0], num_blocks)
    item = cache.element_size()
    block_stride = cache.stride(0) * rows_per_block * item
    page_bytes = cache[0].numel() * rows_per_block * item
    if remainder or block_stride != page_bytes:
        raise ValueError(
            f"layer-wise KV needs a layout with dense blocks, not {tuple(cache.shape)} "
            f"with strides {cache.stride()}"
        )
    pages = torch.empty(0, dtype=torch.uint8, device=cache.device)
    return pages.set_(
        cache.untyped_storage(),
        cache.storage_offset() * item,
        (num_blocks, page_bytes),
        (block_stride, 1),
    )


def fill(pages: GroupPages, block_ids: Sequence[int], *, nan: bool) -> None:
    """Fill blocks with NaN, so that whoever reads them too early or too late is found out, or 0."""
    index = torch.tensor(block_ids, dtype=torch.int64)
    for pool in pages.pool:
        pool.index_fill_(0, index.to(pool.device), POISON_BYTE if nan else 0)
