"""vLLM's attention backend for CPUs, with the memo."""

from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadataBuilder,
)

from services.executor.kv.attention_memo import StepMemo


class MemoCPUAttentionMetadataBuilder(StepMemo, CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Builds once per step."""


class MemoCPUAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return MemoCPUAttentionMetadataBuilder
