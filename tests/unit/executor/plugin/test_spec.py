"""Layer groups are made of layers that are alike, and refused by name where they are not."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from services.executor.kv_options import KVOptions
from services.executor.plugin.spec import layer_group_specs
from services.executor.plugin.worker import refuse_shared_kv
from services.executor.sizing import block_bytes, block_size_for_copies

pytestmark = pytest.mark.filterwarnings("default")

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=64, dtype=torch.bfloat16)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


def cache_of(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


@pytest.mark.parametrize("spec", [SPEC, LATENT], ids=lambda spec: type(spec).__name__)
def test_layers_go_to_groups_in_their_order_and_keep_their_kind(spec: Any) -> None:
    specs: Any = layer_group_specs({name: spec for name in "abcd"}, 2, num_layers=4)

    assert [grouped.group_index for grouped in specs.values()] == [0, 0, 1, 1]
    first, _, other, _ = specs.values()
    assert isinstance(first, type(spec))
    assert first.page_size_bytes == spec.page_size_bytes
    with pytest.raises(AssertionError, match="different groups"):
        first.merge([first, other])
    # Once merged they count as one kind, so that what vLLM makes per kind is made once.
    assert first.merge([first, first]) == other.merge([other, other])


def test_latents_and_keys_with_values_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="KV heads, head sizes or KV dtypes differ"):
        layer_group_specs({"a": SPEC, "b": LATENT}, 1, num_layers=2)


def test_a_latent_is_as_long_as_it_is() -> None:
    """One vector of 512 + 64 values of two bytes per token: nothing is there twice."""
    (group,) = layer_group_specs({"a": LATENT}, 1, num_layers=1).values()

    assert block_bytes(KVOptions(), cache_of(group)) == 16 * 576 * 2


@pytest.mark.parametrize(
    "other", [{"num_kv_heads": 4}, {"head_size": 128}, {"dtype": torch.float32}, {"block_size": 32}]
)
def test_layers_that_differ_are_refused_by_name(other: dict[str, Any]) -> None:
    specs = {"a": SPEC, "b": replace(SPEC, **other)}

    with pytest.raises(ValueError, match="KV heads, head sizes or KV dtypes differ"):
        layer_group_specs(specs, 1, num_layers=2)


@pytest.mark.parametrize(
    "other",
    [
        SlidingWindowSpec(
            block_size=16, num_kv_heads=8, head_size=64, dtype=torch.bfloat16, sliding_window=128
        ),
        ChunkedLocalAttentionSpec(
            block_size=16,
            num_kv_heads=8,
            head_size=64,
            dtype=torch.bfloat16,
            attention_chunk_size=128,
        ),
        MambaSpec(block_size=16, shapes=((8, 64),), dtypes=(torch.bfloat16,)),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_layers_of_other_kinds_are_refused_by_name(other: Any) -> None:
    with pytest.raises(ValueError, match=f"b has {type(other).__name__}"):
        layer_group_specs({"a": SPEC, "b": other}, 1, num_layers=2)


@pytest.mark.parametrize("num_layers", [3, 5])
def test_layers_without_kv_and_stages_of_other_lengths_are_refused_by_name(
    num_layers: int,
) -> None:
    with pytest.raises(ValueError, match=f"4 have some in a pipeline stage of {num_layers}"):
        layer_group_specs({name: SPEC for name in "abcd"}, 1, num_layers=num_layers)


def test_stages_whose_layers_differ_are_refused_by_name() -> None:
    options = KVOptions(layers_per_group=2)

    assert block_bytes(options, cache_of(SPEC, SPEC)) == 2 * 16 * 2 * 8 * 64 * 2
    with pytest.raises(ValueError, match="unlike blocks"):
        block_bytes(options, cache_of(SPEC, replace(SPEC, block_size=32, num_kv_heads=4)))


def test_a_layer_that_reads_anothers_kv_is_refused_by_name() -> None:
    own = SimpleNamespace(kv_sharing_target_layer_name=None)
    refuse_shared_kv({"a": own, "norm": SimpleNamespace()})

    sharing = SimpleNamespace(kv_sharing_target_layer_name="a")
    with pytest.raises(ValueError, match="share KV: b reads that of a"):
        refuse_shared_kv({"a": own, "b": sharing})


@pytest.mark.parametrize(
    ("token_bytes", "block_size"),
    [
        (4096, 32),  # 8 heads of 128, bf16: 128 KiB are 32 tokens
        (2731, 48),  # 131,072 / 2,731 = 47.99
        (1024, 128),  # of which each of four ranks has two heads
        (512, 128),  # 256 tokens would be 128 KiB
        (1 << 20, 16),
    ],
)
def test_pages_are_large_enough_for_copy_engines(token_bytes: int, block_size: int) -> None:
    assert block_size_for_copies(token_bytes) == block_size
