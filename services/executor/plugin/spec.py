"""KV cache specs that give every `layers_per_group` contiguous layers a block table of their own.

vLLM puts layers whose specs merge into one KV cache group, and all groups alias one block pool. A
spec that carries its group's index keeps groups apart while they are formed; once merged, the
index is dropped from comparison, so that the groups count as one kind again wherever vLLM caches
per kind (attention metadata, for one).
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    register_all_kvcache_specs,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    replace_as,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MERGED = -1


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """What makes one of vLLM's specs that of a layer group: layers share a table only within it."""

    group_key: int = MERGED  # keeps groups apart until they are formed, then MERGED
    group_index: int = field(default=0, compare=False)  # in its pipeline stage, from 0

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """Merge the layers of one group; AssertionError tells vLLM that specs do not merge."""
        if any(spec != specs[0] for spec in specs[1:]):
            raise AssertionError("layers of different groups do not share a block table")
        return replace(specs[0], group_key=MERGED)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Answer no for differing groups, or vLLM would put all layers into one."""
        return all(spec == self for spec in kv_cache_specs.values())

    def max_memory_usage_bytes(self, vllm_config: "VllmConfig") -> int:
        """Return what the start-up check must find room for, summed over the groups.

        A request of the maximum length needs one staging buffer of that length, counted on the
        first group, and an open block per group; the rest can live in host memory.
        """
        open_block = int(self.page_size_bytes)  # type: ignore[attr-defined]
        if self.group_index > 0:
            return open_block
        longest = int(super().max_memory_usage_bytes(vllm_config))  # type: ignore[misc]
        return longest + open_block


@dataclass(frozen=True, kw_only=True)
class LayerGroupSpec(LayerGroup, FullAttentionSpec):  # type: ignore[misc]
    """Full attention: K and V of each KV head."""


@dataclass(frozen=True, kw_only=True)
class LatentGroupSpec(LayerGroup, MLAAttentionSpec):  # type: ignore[misc]
    """MLA: one latent vector per token and layer, the same on every tensor-parallel rank."""


# Of a layer's kind, as vLLM names it, the spec of its layer group.
GROUP_SPECS: dict[type[KVCacheSpec], type[LayerGroup]] = {
    FullAttentionSpec: LayerGroupSpec,
    MLAAttentionSpec: LatentGroupSpec,
}


def register() -> None:
    """Make the specs known to vLLM in this process. Idempotent."""
    # A registry that holds anything counts as complete, so the built-in specs go in first.
    register_all_kvcache_specs(None)
    for spec in GROUP_SPECS.values():
        KVCacheSpecRegistry.register(spec, FullAttentionManager, uniform_type_base_spec=spec)


def layer_group_specs(
    specs: dict[str, KVCacheSpec], layers_per_group: int, *, num_layers: int
) -> dict[str, KVCacheSpec]:
    """Return the specs of one worker's layers with their group, in the order of the layers.

    The index counts from the first layer of the pipeline stage: a block id is spent on every rank,
    so group i is made of one slice of each stage, and stages have `num_layers` each. Raises
    ValueError for layers of a kind that has no layer groups, layers unlike each other, a number of
    layers that the groups do not divide, and layers without KV: all sizes are made of the model's
    layers.
    """
    for name, spec in specs.items():
        if type(spec) not in GROUP_SPECS:
            raise ValueError(
                f"layer-wise KV needs full attention, {name} has {type(spec).__name__}"
            )
    # vLLM would make their pages alike by blocks of unlike lengths: blocks here have one length.
    if len({(spec.block_size, spec.page_size_bytes) for spec in specs.values()}) > 1:
        raise ValueError(
            "layer-wise KV does not work with layers whose KV heads, head sizes or KV dtypes differ"
        )
    if len(specs) != num_layers:
        raise ValueError(
            f"layer-wise KV needs KV in every layer, {len(specs)} have some in a pipeline stage of "
            f"{num_layers}"
        )
    if len(specs) % layers_per_group:
        raise ValueError(
            f"layers_per_group={layers_per_group} does not divide the {len(specs)} layers "
            "of a pipeline stage"
        )
    grouped: dict[str, Any] = {}
    for layer, (name, spec) in enumerate(specs.items()):
        group = layer // layers_per_group
        grouped[name] = replace_as(
            spec, GROUP_SPECS[type(spec)], group_key=group, group_index=group
        )
    return grouped


register()
