"""Builds attention metadata once per step instead of once per layer group.

Groups of one step differ in their block table and slot mapping only; everything else in the
metadata, and all the work of building it, is the same.
"""

import copy
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

PACKAGE = "services.executor.kv"
CPU_BACKEND = f"{PACKAGE}.cpu_attention.MemoCPUAttentionBackend"
FLASH_BACKEND = f"{PACKAGE}.flash_attention.MemoFlashAttentionBackend"


class StepMemo:
    """Over a metadata builder: remembers what it built for the other groups of the same step."""

    # The tensors of a step are kept, so that their identity stands for the step.
    _built: tuple[tuple[Any, ...], Any] | None = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        common = common_attn_metadata
        step = (common.query_start_loc, common.seq_lens, common.causal)
        extents = (
            common.num_reqs,
            common.num_actual_tokens,
            common.max_query_len,
            common.max_seq_len,
        )
        cls = type(self)
        if cls._built is not None and _same(cls._built[0], (*step, *extents), len(step)):
            metadata = copy.copy(cls._built[1])
            metadata.block_table = common.block_table_tensor
            metadata.slot_mapping = common.slot_mapping
            return metadata
        metadata = super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
        cls._built = ((*step, *extents), metadata)
        return metadata


def _same(left: tuple[Any, ...], right: tuple[Any, ...], num_by_identity: int) -> bool:
    return left[num_by_identity:] == right[num_by_identity:] and all(
        a is b for a, b in zip(left[:num_by_identity], right[:num_by_identity], strict=True)
    )


def install_memo() -> None:
    """Make vLLM use the memo in this process, for the backends that it knows of."""
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    else:
        register_backend(AttentionBackendEnum.FLASH_ATTN, FLASH_BACKEND)
