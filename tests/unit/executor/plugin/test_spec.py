"""Layer groups are made of layers that are alike, and refused by name where they are not."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from services.executor.plugin.spec import layer_group_specs
from services.executor.plugin.worker import refuse_shared_kv
from services.executor.sizing import (
    block_bytes,
    block_geometry,
    block_size_for_copies,
    offloadable_groups,
    side_window,
)
from services.placement.blocks import STATE, BlockGeometry

pytestmark = pytest.mark.filterwarnings("default")

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=64, dtype=torch.bfloat16)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


def of_tokens(*, in_flight: int) -> Any:
    """Return what geometry takes of vLLM's settings."""
    return SimpleNamespace(max_in_flight_tokens=in_flight, num_speculative_tokens=0)


def cache_of(*specs: Any, num_layers: int = 1) -> Any:
    names = ["layer"] * num_layers
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=names) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups)


def test_side_groups_change_no_size_of_those_that_may_leave() -> None:
    specs: Any = layer_group_specs({"a": SPEC, "b": WINDOW, "c": STATES}, 1)
    cache = cache_of(*specs.values())

    assert block_bytes(cache) == SPEC.page_size_bytes
    assert [group.kv_cache_spec for group in offloadable_groups(cache)] == [specs["a"]]
    geometry = block_geometry(
        SimpleNamespace(max_in_flight_tokens=7, num_speculative_tokens=0), cache
    )
    assert geometry == BlockGeometry(
        num_groups=1, block_size=16, side_windows=(128, STATE), max_in_flight_tokens=7
    )


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

    assert block_bytes(cache_of(group)) == 16 * 576 * 2


@pytest.mark.parametrize(
    "other", [{"num_kv_heads": 4}, {"head_size": 128}, {"dtype": torch.float32}, {"block_size": 32}]
)
def test_layers_that_differ_are_refused_by_name(other: dict[str, Any]) -> None:
    specs = {"a": SPEC, "b": replace(SPEC, **other)}

    with pytest.raises(ValueError, match="KV heads, head sizes or KV dtypes differ"):
        layer_group_specs(specs, 1, num_layers=2)


CHUNKS = ChunkedLocalAttentionSpec(
    block_size=16, num_kv_heads=8, head_size=64, dtype=torch.bfloat16, attention_chunk_size=128
)
WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=8, head_size=64, dtype=torch.bfloat16, sliding_window=128
)
STATES = MambaSpec(block_size=16, shapes=((8, 64),), dtypes=(torch.bfloat16,))


class SpecOfTomorrow(AttentionSpec):  # type: ignore[misc]
    pass


def test_layers_of_other_kinds_are_refused_by_name() -> None:
    other = SpecOfTomorrow(block_size=16, num_kv_heads=8, head_size=64, dtype=torch.bfloat16)

    with pytest.raises(ValueError, match="b has SpecOfTomorrow"):
        layer_group_specs({"a": SPEC, "b": other}, 1)


@pytest.mark.parametrize("spec", [WINDOW, CHUNKS, STATES], ids=lambda spec: type(spec).__name__)
def test_a_model_of_which_no_layer_may_leave_is_refused_by_name(spec: Any) -> None:
    with pytest.raises(ValueError, match="some layers with full attention"):
        layer_group_specs({"a": spec, "b": spec}, 1)


def test_groups_that_may_leave_come_first_then_windows_then_states() -> None:
    layers = {"w0": WINDOW, "f0": SPEC, "s0": STATES, "w1": WINDOW, "f1": SPEC, "s1": STATES}

    specs: Any = layer_group_specs(layers, 1)

    assert list(specs) == ["f0", "f1", "w0", "w1", "s0", "s1"]
    assert [side_window(spec) for spec in specs.values()] == [None, None, 128, 128, STATE, STATE]
    assert [specs[name].group_index for name in ("f0", "f1", "w0", "w1")] == [0, 1, 2, 3]
    assert specs["w0"].merge([specs["w0"]]) == specs["w1"].merge([specs["w1"]])
    assert specs["w0"].merge([specs["w0"]]) != specs["f0"].merge([specs["f0"]])
    assert specs["s0"] is STATES


def test_chunks_keep_what_a_window_as_long_would_and_kernels_are_not_told_of_one() -> None:
    specs: Any = layer_group_specs({"f": SPEC, "c": CHUNKS}, 1)

    assert side_window(specs["c"]) == 128
    assert specs["c"].sliding_window is None
    assert specs["c"].attention_chunk_size == 128


def test_blocks_have_as_many_bytes_where_the_heads_of_windows_are_unlike_the_others() -> None:
    window = replace(WINDOW, num_kv_heads=16, head_size=64)

    specs: Any = layer_group_specs({"f": SPEC, "w": window}, 1)
    others: Any = layer_group_specs({"f": replace(SPEC, num_kv_heads=32), "w": WINDOW}, 1)

    assert [specs[name].block_size for name in "fw"] == [32, 16]
    assert [others[name].block_size for name in "fw"] == [16, 64]
    assert len({spec.page_size_bytes for spec in specs.values()}) == 1
    config = SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec, layer_names=["l"]) for spec in specs.values()
        ]
    )
    geometry = block_geometry(
        SimpleNamespace(max_in_flight_tokens=64, num_speculative_tokens=0), config
    )
    assert (geometry.block_size, geometry.window_block_size) == (32, 16)


def test_windows_whose_tokens_take_no_whole_part_of_the_others_are_refused() -> None:
    with pytest.raises(ValueError, match="KV heads, head sizes or KV dtypes differ"):
        layer_group_specs({"f": SPEC, "w": replace(WINDOW, head_size=96)}, 1)


@pytest.mark.parametrize(("asked", "taken"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4)])
def test_the_largest_number_is_taken_that_divides_the_layers_of_each_kind(
    asked: int, taken: int
) -> None:
    layers = {f"f{n}": SPEC for n in range(4)} | {f"w{n}": WINDOW for n in range(12)}

    specs: Any = layer_group_specs(layers, asked)

    sizes = Counter(spec.group_key for spec in specs.values())
    assert set(sizes.values()) == {taken}


@pytest.mark.parametrize("side", [WINDOW, CHUNKS], ids=lambda spec: type(spec).__name__)
def test_a_window_that_no_request_outgrows_is_none(side: Any) -> None:
    specs: Any = layer_group_specs({"a": SPEC, "b": side}, 1, max_model_len=128)
    assert [side_window(spec) for spec in specs.values()] == [None, None]

    specs = layer_group_specs({"a": SPEC, "b": side}, 1, max_model_len=129)
    assert [side_window(spec) for spec in specs.values()] == [None, 128]


@pytest.mark.parametrize(("num_drafts", "num_open", "num_kept"), [(0, 1, 12 + 1), (5, 2, 13 + 1)])
def test_the_start_up_check_finds_room_for_a_windows_tokens_and_those_in_flight(
    num_drafts: int, num_open: int, num_kept: int
) -> None:
    """127 + 64 in 16s and one; drafts of two steps, and the drafter's, are 15 more."""
    specs: Any = layer_group_specs({"a": SPEC, "b": WINDOW}, 1)
    config = SimpleNamespace(
        max_in_flight_tokens=64,
        num_speculative_tokens=num_drafts,
        num_lookahead_tokens=num_drafts,
        max_concurrent_batches=2,
        model_config=SimpleNamespace(max_model_len=4_096),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    page = SPEC.page_size_bytes

    assert specs["a"].max_memory_usage_bytes(config) == (4_096 // 16 + num_open) * page
    assert specs["b"].max_memory_usage_bytes(config) == num_kept * page


@pytest.mark.parametrize("num_layers", [3, 5])
def test_stages_of_other_lengths_are_refused_by_name(num_layers: int) -> None:
    with pytest.raises(ValueError, match=f"4 of {num_layers} have it"):
        layer_group_specs({name: SPEC for name in "abcd"}, 1, num_layers=num_layers)


def test_stages_whose_layers_differ_are_refused_by_name() -> None:
    assert block_bytes(cache_of(SPEC, SPEC, num_layers=2)) == 2 * 16 * 2 * 8 * 64 * 2
    with pytest.raises(ValueError, match="unlike blocks"):
        block_bytes(cache_of(SPEC, replace(SPEC, block_size=32, num_kv_heads=4)))


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


def test_layers_that_make_drafts_are_one_side_group_that_keeps_everything() -> None:
    specs = layer_group_specs(
        {name: SPEC for name in ("a", "b", "c", "d", "head")},
        2,
        max_model_len=4_096,
        drafting={"head"},
    )

    windows = {name: side_window(spec) for name, spec in specs.items()}
    assert windows == {"a": None, "b": None, "c": None, "d": None, "head": 4_096}
    assert [specs[name].group_index for name in specs] == [0, 1, 2, 3, 4]  # of one layer, as it


def test_layers_that_make_drafts_in_several_groups_are_refused() -> None:
    specs = {name: SPEC for name in ("a", "b", "c", "d", "e", "f")}

    with pytest.raises(ValueError, match="the 2 layers that make drafts in one layer group"):
        layer_group_specs(specs, 1, max_model_len=4_096, drafting={"e", "f"})
    with pytest.raises(ValueError, match="full attention where drafts are made, f has"):
        layer_group_specs({**specs, "f": WINDOW}, 1, max_model_len=4_096, drafting={"f"})
    pairs = layer_group_specs(specs, 2, max_model_len=4_096, drafting={"e", "f"})
    assert [spec.group_index for spec in pairs.values()] == [0, 0, 1, 1, 2, 2]
    alone = layer_group_specs(  # windows and what makes drafts share no group, however many each
        {**specs, "c": WINDOW, "d": WINDOW, "e": WINDOW}, 2, max_model_len=4_096, drafting={"f"}
    )
    assert [spec.group_index for spec in alone.values()] == [0, 1, 2, 3, 4, 5]
