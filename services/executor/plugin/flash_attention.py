"""Builds FlashAttention's metadata once per step instead of once per layer group.

Groups of one step differ in their block table and slot mapping only. vLLM's second model runner
does not ask builders to change just these two but for Mamba layers. With FlashAttention 3 it is
one scheduling kernel that is saved per group.
"""

from typing import Any

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from services.executor.plugin.step_memo import StepMemo


class MemoFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Remembers what it built for the other groups of the same step."""

    _memo = StepMemo[FlashAttentionMetadata]()  # of all groups

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        common, memo = common_attn_metadata, self._memo
        window = getattr(self.kv_cache_spec, "sliding_window", None)
        metadata = memo.find(common, window)
        if metadata is not None:
            return self.update_block_table(metadata, common.block_table_tensor, common.slot_mapping)
        metadata = super().build(common_prefix_len, common, fast_build)
        memo.keep(common, window, metadata)
        return metadata


class MemoFlashAttentionBackend(FlashAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return MemoFlashAttentionMetadataBuilder


def install_memo() -> None:
    """Make vLLM use the memo in this process."""
    register_backend(
        AttentionBackendEnum.FLASH_ATTN, f"{__name__}.{MemoFlashAttentionBackend.__name__}"
    )
