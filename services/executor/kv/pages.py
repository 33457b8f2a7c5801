"""KV memory as pages: one page is one block of one layer, as bytes.

A host slot holds the pages of one block for all layers of a group, so that each layer of a group
has a slab of its own, shared by the groups: slot i is the same row in each of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPages:
    """One layer group's pages."""

    pool: tuple[torch.Tensor, ...]  # per layer: [num_blocks, page_bytes] uint8, views of the KV
    host: tuple[torch.Tensor, ...]  # per layer: [num_slots, page_bytes] uint8

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over the group's layers."""
        return sum(pages.shape[1] for pages in self.pool)


def map_pages(
    kv_caches: Mapping[str, torch.Tensor],
    groups: Sequence[Sequence[str]],
    *,
    num_blocks: int,
    num_slots: int,
) -> list[GroupPages]:
    """Return each group's pages, with host memory allocated for `num_slots` slots.

    Host memory is touched when it is first written, so that a slab that is never filled costs
    address space only. Raises ValueError if blocks are not dense.
    """
    pool = {name: _as_pages(kv_caches[name], num_blocks) for names in groups for name in names}
    slabs: list[torch.Tensor] = []
    mapped = []
    for names in groups:
        for index, name in enumerate(names):
            if index == len(slabs):
                slabs.append(torch.empty((num_slots, pool[name].shape[1]), dtype=torch.uint8))
        mapped.append(
            GroupPages(pool=tuple(pool[name] for name in names), host=tuple(slabs[: len(names)]))
        )
    return mapped


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
