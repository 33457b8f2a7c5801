"""vLLM's FlashAttention backend, with the memo."""

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionMetadataBuilder,
)

from services.executor.kv.attention_memo import StepMemo


class MemoFlashAttentionMetadataBuilder(
    StepMemo,
    FlashAttentionMetadataBuilder,  # type: ignore[misc]
):
    """Builds once per step: with FlashAttention 3, one scheduling kernel and not one per group."""


class MemoFlashAttentionBackend(FlashAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return MemoFlashAttentionMetadataBuilder
