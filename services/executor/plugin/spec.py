"""KV cache specs that give every `layers_per_group` contiguous layers a block table of their own.

vLLM puts layers whose specs merge into one KV cache group, and all groups alias one block pool. A
spec that carries its group's index keeps groups apart while they are formed; once merged, the
index is dropped from comparison, so that the groups count as one kind again wherever vLLM caches
per kind (attention metadata, for one).

Layers that keep less than all KV form *side groups*, which never leave the pool and come last. One
with a window is full attention with `sliding_window` set, one with chunks full attention with
`attention_chunk_size`, as vLLM itself makes them where it keeps no blocks by kind: that touches the
blocks only, kernels take the window from the layer. A chunk's tokens attend to those since its
beginning, so it keeps what a window as long would, and at most twice what it needs. One with states
keeps vLLM's spec, for which its runner and its kernels ask. Layers that make drafts keep all of
their KV, as one side group: a window as long as the longest context.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    register_all_kvcache_specs,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    replace_as,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from services.executor.sizing import max_ahead_tokens, side_window

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Specs: TypeAlias = dict[str, KVCacheSpec]
MERGED = -1
# Of a layer's spec that keeps the newest tokens: the fields that full attention does not have.
WINDOW_FIELDS: Mapping[type[KVCacheSpec], tuple[str, ...]] = {
    SlidingWindowSpec: ("extra_retained_tokens",),
    ChunkedLocalAttentionSpec: (),
}


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
        first group, and an open block per group, more where drafts run ahead; the rest can live in
        host memory.
        """
        open_block = int(self.page_size_bytes)  # type: ignore[attr-defined]
        num_ahead = max_ahead_tokens(vllm_config)
        window = side_window(self)
        if window is not None:
            num_tokens = window - 1 + vllm_config.max_in_flight_tokens + num_ahead
            num_longest = -(-vllm_config.model_config.max_model_len // self.block_size)  # type: ignore[attr-defined]
            return open_block * int(min(num_longest, -(-num_tokens // self.block_size) + 1))  # type: ignore[attr-defined]
        open_blocks = open_block * (1 + -(-num_ahead // self.block_size))  # type: ignore[attr-defined]
        if self.group_index > 0:
            return int(open_blocks)
        longest = int(super().max_memory_usage_bytes(vllm_config))  # type: ignore[misc]
        return longest + int(open_blocks)


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
    SlidingWindowSpec: LayerGroupSpec,
    ChunkedLocalAttentionSpec: LayerGroupSpec,
}


def register() -> None:
    """Make the specs known to vLLM in this process. Idempotent."""
    # A registry that holds anything counts as complete, so the built-in specs go in first.
    register_all_kvcache_specs(None)
    for spec in set(GROUP_SPECS.values()):
        KVCacheSpecRegistry.register(spec, FullAttentionManager, uniform_type_base_spec=spec)


def layer_group_specs(
    specs: dict[str, KVCacheSpec],
    layers_per_group: int,
    *,
    num_layers: int | None = None,
    max_model_len: int | None = None,
    drafting: Collection[str] = (),
) -> dict[str, KVCacheSpec]:
    """Return the specs of one worker's layers with their group: those that may leave, then others.

    The index counts from the first layer of the pipeline stage: a block id is spent on every rank,
    so group i is made of one slice of each stage. `num_layers`: that each stage has, where there
    are several; they must be alike. `max_model_len`: tokens; a longer window is none. `drafting`:
    layers that make drafts.

    Where all layers may leave, `layers_per_group` must divide them. Beside layers that stay it is
    the most, and the largest number is taken that divides the layers of each kind.

    Raises ValueError for layers unlike each other, without any that may leave, or of another kind.
    """
    drafts = {name: spec for name, spec in specs.items() if name in drafting}
    model = {name: spec for name, spec in specs.items() if name not in drafting}
    full, windows, states = _by_kind(model, max_model_len)
    kinds = (full, windows, drafts, states)
    if drafts:
        assert max_model_len is not None
        windows = {**windows, **_always_kept(drafts, max_model_len)}
    full, windows = _of_one_page(full, windows)
    alike = {**full, **windows}
    if num_layers is not None and len(full) != num_layers:
        raise ValueError(
            f"layer-wise KV needs full attention in every layer of a pipeline stage, {len(full)} "
            f"of {num_layers} have it"
        )
    if windows or states:
        layers_per_group = common_layers_per_group(layers_per_group, *kinds)
        if len(drafts) > layers_per_group:
            raise ValueError(
                f"layer-wise KV needs the {len(drafts)} layers that make drafts in one layer group:"
                " at least as many layers_per_group, where their number divides that of each kind "
                "of the model's layers"
            )
    elif len(full) % layers_per_group:
        raise ValueError(
            f"layers_per_group={layers_per_group} does not divide the {len(full)} layers "
            "of a pipeline stage"
        )
    grouped: dict[str, Any] = {}
    for layer, (name, spec) in enumerate(alike.items()):
        group = layer // layers_per_group
        grouped[name] = replace_as(
            spec,
            GROUP_SPECS[type(spec)],
            drop=WINDOW_FIELDS.get(type(spec), ()),
            group_key=group,
            group_index=group,
        )
    return {**grouped, **states}


def _always_kept(drafts: Specs, max_model_len: int) -> Specs:
    """Return the specs of layers that make drafts as those of a window that nothing leaves."""
    for name, spec in drafts.items():
        if type(spec) is not FullAttentionSpec:
            raise ValueError(
                f"layer-wise KV needs full attention where drafts are made, {name} has "
                f"{type(spec).__name__}"
            )
    return {name: replace(spec, sliding_window=max_model_len) for name, spec in drafts.items()}


def _of_one_page(full: Specs, windows: Specs) -> tuple[Specs, Specs]:
    """Return layers whose blocks have as many bytes: more tokens where a token takes fewer.

    Raises ValueError unless those that may leave are alike, and those with windows.
    """
    sizes = [
        {(spec.block_size, spec.page_size_bytes) for spec in specs.values()}
        for specs in (full, windows)
    ]
    pages = [page for found in sizes for _, page in found]
    longest = max(pages, default=0)
    if any(len(found) > 1 for found in sizes) or any(longest % page for page in pages):
        raise ValueError(
            "layer-wise KV does not work with layers whose KV heads, head sizes or KV dtypes differ"
        )
    if len(set(pages)) <= 1:
        return full, windows
    return _with_page(full, longest), _with_page(windows, longest)


def _with_page(specs: Specs, page_bytes: int) -> Specs:
    return {
        name: replace(spec, block_size=spec.block_size * page_bytes // spec.page_size_bytes)
        for name, spec in specs.items()
    }


def common_layers_per_group(most: int, *kinds: Mapping[str, KVCacheSpec]) -> int:
    """Return the largest number of layers, up to `most`, that divides those of each kind."""
    common = math.gcd(*map(len, kinds))
    return max(number for number in range(1, most + 1) if common % number == 0)


def _by_kind(specs: Specs, max_model_len: int | None) -> tuple[Specs, Specs, Specs]:
    """Return layers with all of their KV, with a window of it, and with a state."""
    full, windows, states = Specs(), Specs(), Specs()
    for name, spec in specs.items():
        if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
            full[name] = spec
        elif type(spec) in WINDOW_FIELDS:
            window = side_window(spec)
            if window is not None and max_model_len is not None and window >= max_model_len:
                full[name] = _without_window(spec)
            else:
                windows[name] = spec
        elif isinstance(spec, MambaSpec) and not spec.num_speculative_blocks:
            states[name] = spec
        else:
            raise ValueError(
                f"layer-wise KV needs full attention, {name} has {type(spec).__name__}"
            )
    if specs and not full:
        raise ValueError("layer-wise KV needs some layers with full attention: no other may leave")
    return full, windows, states


def _without_window(spec: KVCacheSpec) -> KVCacheSpec:
    """Return a spec whose window holds the longest context as what it comes to."""
    own = ("sliding_window", "attention_chunk_size", *WINDOW_FIELDS[type(spec)])
    return replace_as(spec, FullAttentionSpec, drop=own)


register()
