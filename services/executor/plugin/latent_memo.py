"""Builds MLA's attention metadata once per step instead of once per layer group.

Groups of one step differ in their block table and slot mapping only, and none of vLLM's builders
for MLA can change just these two. All of them share a base, which is where this is done: on every
device, in either model runner. And each has a workspace for what is computed behind a long context:
one is enough, for layers run one after the other.
"""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonMetadata,
    MLACommonMetadataBuilder,
)

from services.executor.plugin.step_memo import StepMemo


class LatentMemo:
    """What was built for the first group of a step, and the workspace of all."""

    def __init__(self, init: Callable[..., None], build: Callable[..., MLACommonMetadata]) -> None:
        """`init` and `build`: of vLLM's builders."""
        self._init, self._build = init, build
        self._workspace: torch.Tensor | None = None
        self._memo = StepMemo[MLACommonMetadata]()

    def init(self, builder: Any, *args: Any, **kwargs: Any) -> None:
        """Make a builder, in place of its own `__init__`."""
        self._init(builder, *args, **kwargs)
        own, first = builder.chunked_prefill_workspace, self._workspace
        if first is not None and _is_alike(own, first):
            builder.chunked_prefill_workspace = first
        else:
            self._workspace = own

    def build(
        self, builder: Any, common_prefix_len: int, common: Any, fast_build: bool = False
    ) -> MLACommonMetadata:
        """Return a group's metadata, in place of a builder's own `build`."""
        kind = type(builder), builder.kv_cache_spec
        metadata = self._memo.find(common, kind)
        if metadata is not None:
            return with_tables(metadata, common.block_table_tensor, common.slot_mapping)
        metadata = self._build(builder, common_prefix_len, common, fast_build)
        self._memo.keep(common, kind, metadata)
        return metadata


def with_tables(
    metadata: MLACommonMetadata, block_table: torch.Tensor, slot_mapping: torch.Tensor
) -> MLACommonMetadata:
    """Return another group's metadata of the same step. Decodes come before prompts."""
    updated = copy(metadata)
    updated.slot_mapping = slot_mapping
    num_decodes = metadata.num_decodes
    if metadata.decode is not None:
        updated.decode = copy(metadata.decode)
        updated.decode.block_table = block_table[:num_decodes]
    if metadata.prefill is not None:
        updated.prefill = copy(metadata.prefill)
        updated.prefill.block_table = block_table[num_decodes:]
    return updated


def install_memo() -> None:
    """Make vLLM's builders for MLA use the memo in this process. Idempotent."""
    cls = MLACommonMetadataBuilder
    if hasattr(cls, "latent_memo"):
        return
    cls.latent_memo = memo = LatentMemo(cls.__init__, cls.build)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        memo.init(self, *args, **kwargs)

    def build(
        self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> MLACommonMetadata:
        return memo.build(self, common_prefix_len, common_attn_metadata, fast_build)

    cls.__init__, cls.build = init, build


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
