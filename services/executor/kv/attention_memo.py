"""Builds attention metadata once per step instead of once per layer group, on CPU.

Groups of one step differ in their block table and slot mapping only. vLLM knows this and asks
builders that can to change just these two; the CPU's cannot.
"""

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


class MemoCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Makes one group's metadata from another's of the same step."""

    supports_update_block_table = True

    def update_block_table(
        self, metadata: CPUAttentionMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> CPUAttentionMetadata:
        updated = object.__new__(CPUAttentionMetadata)
        updated.__dict__.update(metadata.__dict__)
        updated.block_table = blk_table
        updated.slot_mapping = slot_mapping
        return updated


class MemoCPUAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return MemoCPUAttentionMetadataBuilder


def install_memo() -> None:
    """Make vLLM use the memo in this process."""
    register_backend(
        AttentionBackendEnum.CPU_ATTN, f"{__name__}.{MemoCPUAttentionBackend.__name__}"
    )
