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


class MemoFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Remembers what it built for the other groups of the same step."""

    # With the tensors of its step, which are kept, so that their identity stands for the step.
    _built: tuple[tuple[Any, ...], tuple[Any, ...], FlashAttentionMetadata] | None = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        common, cls = common_attn_metadata, type(self)
        step = (common.query_start_loc, common.seq_lens, common.causal)
        extents = (
            getattr(self.kv_cache_spec, "sliding_window", None),
            common.num_reqs,
            common.num_actual_tokens,
            common.max_query_len,
            common.max_seq_len,
        )
        if cls._built is not None:
            same_step, same_extents, metadata = cls._built
            is_same = all(a is b for a, b in zip(step, same_step, strict=True))
            if is_same and extents == same_extents:
                return self.update_block_table(
                    metadata, common.block_table_tensor, common.slot_mapping
                )
        metadata = super().build(common_prefix_len, common, fast_build)
        cls._built = (step, extents, metadata)
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
