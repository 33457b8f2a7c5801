"""Builds attention metadata once per step instead of once per layer group.

Groups of one step differ in their block table and slot mapping only; everything else in the
metadata, and all the work of building it, is the same.
"""

import copy
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


class MemoCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Remembers the last step's metadata for the other groups of the same step."""

    # The tensors of a step are kept, so that their identity stands for the step.
    _built: tuple[tuple[Any, ...], CPUAttentionMetadata] | None = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        common = common_attn_metadata
        step = (common.query_start_loc, common.seq_lens, common.causal)
        extents = (
            common.num_reqs,
            common.num_actual_tokens,
            common.max_query_len,
            common.max_seq_len,
        )
        built = MemoCPUAttentionMetadataBuilder._built
        if built is not None and _same(built[0], (*step, *extents), len(step)):
            metadata = copy.copy(built[1])
            metadata.block_table = common.block_table_tensor
            metadata.slot_mapping = common.slot_mapping
            return metadata
        metadata = super().build(common_prefix_len, common, fast_build)
        MemoCPUAttentionMetadataBuilder._built = ((*step, *extents), metadata)
        return metadata


def _same(left: tuple[Any, ...], right: tuple[Any, ...], num_by_identity: int) -> bool:
    return left[num_by_identity:] == right[num_by_identity:] and all(
        a is b for a, b in zip(left[:num_by_identity], right[:num_by_identity], strict=True)
    )


class MemoCPUAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return MemoCPUAttentionMetadataBuilder


def install_memo() -> None:
    """Make vLLM use the memo in this process, on CPU."""
    if current_platform.is_cpu():
        register_backend(
            AttentionBackendEnum.CPU_ATTN, f"{__name__}.{MemoCPUAttentionBackend.__name__}"
        )
