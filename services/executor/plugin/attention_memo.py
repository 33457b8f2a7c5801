"""Builds attention metadata once per step instead of once per layer group, on CPU.

Groups of one step differ in their block table and slot mapping only. vLLM knows this and asks
builders that can to change just these two; the CPU's cannot.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import KVCacheGroupSpec


class MemoCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Makes one group's metadata from another's of the same step."""

    supports_update_block_table = True

    def update_block_table(
        self, metadata: CPUAttentionMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> CPUAttentionMetadata:
        return with_tables(metadata, blk_table, slot_mapping)


def with_tables(
    metadata: CPUAttentionMetadata, block_table: torch.Tensor, slot_mapping: torch.Tensor
) -> CPUAttentionMetadata:
    """Return another group's metadata of the same step."""
    updated = object.__new__(CPUAttentionMetadata)
    updated.__dict__.update(metadata.__dict__)
    updated.block_table = block_table
    updated.slot_mapping = slot_mapping
    return updated


class MemoCPUAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return MemoCPUAttentionMetadataBuilder


def is_of_one_kind(groups: Sequence[KVCacheGroupSpec]) -> bool:
    """Return whether one group's metadata is right for all.

    It is not where windows differ: how a step reads contexts is laid out in it, by the length that
    is read. vLLM itself then builds once per kind.
    """
    return all(group.kv_cache_spec == groups[0].kv_cache_spec for group in groups)


def build_once(runner: Any) -> None:
    """Make a CPU runner build its first group's metadata only, and the others' from it.

    vLLM would go through all its steps for each group before it finds that only two things differ.
    The runner's block tables are `StackedBlockTables`, its groups of one kind.
    """
    if any(g.kernel_block_size is not None for groups in runner.attn_groups for g in groups):
        return  # kernels see other blocks than the tables, by a mapping of each group's
    build, config = runner._build_attention_metadata, runner.kv_cache_config
    names = [group.layer_names for group in config.kv_cache_groups]
    first_only = copy(config)
    first_only.kv_cache_groups = config.kv_cache_groups[:1]

    def find_slots(
        num_tokens_padded: int,
        num_reqs_padded: int,
        num_tokens_unpadded: int,
        ubatch_slices: None = None,
    ) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
        tables = runner.input_batch.block_table
        slots = tables.slots_of_groups(num_tokens_unpadded, num_padded=num_tokens_padded)
        by_layer = {
            layer: mine for mine, layers in zip(slots, names, strict=True) for layer in layers
        }
        return dict(enumerate(slots)), by_layer

    def build_all(*, slot_mappings: Mapping[int, torch.Tensor], **options: Any) -> Any:
        runner.kv_cache_config = first_only
        try:
            metadata, common = build(slot_mappings=slot_mappings, **options)
        finally:
            runner.kv_cache_config = config
        first = metadata[names[0][0]]
        rows = runner.input_batch.block_table.rows_of_groups(len(first.block_table))
        for index, layers in enumerate(names[1:], start=1):
            others = with_tables(first, rows[index], slot_mappings[index])
            metadata.update(dict.fromkeys(layers, others))
        return metadata, common

    runner._get_slot_mappings = find_slots
    runner._build_attention_metadata = build_all


def install_memo() -> None:
    """Make vLLM use the memo in this process."""
    register_backend(
        AttentionBackendEnum.CPU_ATTN, f"{__name__}.{MemoCPUAttentionBackend.__name__}"
    )
