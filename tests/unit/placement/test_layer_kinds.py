"""What layers keep, as files of checkpoints on the hub say it: each family in its own way."""

from collections import Counter
from typing import Any

import pytest

from services.placement.layer_kinds import Layer, LayerKind, layers_of

K = LayerKind
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}
WINDOWS = {**LLAMA, "sliding_window": 4096}
QWEN3_MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 48,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
KIMI_LINEAR = {**DEEPSEEK_V3, "linear_attn_config": {"full_attn_layers": [4, 8]}}
GPT_OSS = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_attention_heads": 64,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}
GEMMA_3_27B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
    },
    "vision_config": {"num_hidden_layers": 27},
}
NEMOTRON_H = {**LLAMA, "model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-ME"}


def kinds_of(config: dict[str, Any]) -> list[LayerKind]:
    return [layer.kind for layer in layers_of(config)]


@pytest.mark.parametrize(
    ("config", "counts"),
    [
        (LLAMA, {K.FULL: 32}),
        (QWEN3_MOE, {K.FULL: 48}),
        (DEEPSEEK_V3, {K.LATENT: 61}),
        ({**DEEPSEEK_V3, "index_topk": 2048}, {K.SPARSE: 61}),  # V3.2
        ({**LLAMA, "model_type": "deepseek_v4", "compress_ratios": [0, 128, 4]}, {K.SPARSE: 32}),
        (GPT_OSS, {K.WINDOW: 18, K.FULL: 18}),
        ({**GPT_OSS, "layer_types": None}, {K.WINDOW: 18, K.FULL: 18}),
        # Six of 62: the 6th, 12th, and so on up to the 60th are ten.
        (GEMMA_3_27B, {K.WINDOW: 52, K.FULL: 10}),
        ({**WINDOWS, "model_type": "mistral"}, {K.WINDOW: 32}),
        ({**WINDOWS, "use_sliding_window": False}, {K.FULL: 32}),
        ({**WINDOWS, "max_window_layers": 28}, {K.FULL: 28, K.WINDOW: 4}),
        ({**WINDOWS, "sliding_window_pattern": "LLLG"}, {K.WINDOW: 24, K.FULL: 8}),
        ({**WINDOWS, "hybrid_layer_pattern": [0, 1] * 16}, {K.FULL: 16, K.WINDOW: 16}),
        ({**LLAMA, "model_type": "llama4_text"}, {K.CHUNK: 24, K.FULL: 8}),
        ({**LLAMA, "no_rope_layers": [1, 1, 1, 0] * 8}, {K.FULL: 32}),  # nothing is chunked
        ({**LLAMA, "model_type": "qwen3_next"}, {K.STATE: 24, K.FULL: 8}),
        ({**LLAMA, "layer_types": ["mamba", "attention"] * 16}, {K.STATE: 16, K.FULL: 16}),
        ({**LLAMA, "attn_layer_indices": [9, 18, 27]}, {K.STATE: 29, K.FULL: 3}),
        ({**LLAMA, "model_type": "jamba"}, {K.STATE: 28, K.FULL: 4}),
        ({**LLAMA, "attn_type_list": [0] * 7 + [1] + [0] * 24}, {K.STATE: 31, K.FULL: 1}),
        (KIMI_LINEAR, {K.STATE: 59, K.LATENT: 2}),
        ({**LLAMA, "model_type": "falcon_h1"}, {K.FULL_AND_STATE: 32}),
        ({**LLAMA, "layer_types": ["of_tomorrow"] * 32}, {K.UNKNOWN: 32}),
    ],
)  # fmt: skip
def test_kinds_are_counted_as_the_file_says(
    config: dict[str, Any], counts: dict[LayerKind, int]
) -> None:
    assert Counter(kinds_of(config)) == counts


def test_layers_are_in_the_models_order() -> None:
    assert kinds_of(GPT_OSS)[:2] == [K.WINDOW, K.FULL]
    assert kinds_of(GEMMA_3_27B)[4:7] == [K.WINDOW, K.FULL, K.WINDOW]
    assert kinds_of({**NEMOTRON_H, "num_hidden_layers": 7}) == [
        K.STATE,
        K.NOTHING,
        K.STATE,
        K.FULL,
        K.NOTHING,
        K.STATE,
        K.NOTHING,
    ]


def test_a_file_without_a_number_of_layers_has_as_many_as_it_names() -> None:
    assert len(layers_of({**NEMOTRON_H, "num_hidden_layers": None})) == 7


@pytest.mark.parametrize(
    ("config", "token_values"),
    [
        (LLAMA, 2 * 8 * 128),  # 4,096 / 32 values per head, K and V
        (QWEN3_MOE, 2 * 4 * 128),
        (DEEPSEEK_V3, 512 + 64),  # whatever the heads
        ({**LLAMA, "model_type": "minicpm3", "kv_lora_rank": 256}, 2 * 8 * 128),
        ({**LLAMA, "multi_query": True, "num_key_value_heads": None}, 2 * 128),
        ({**LLAMA, "num_key_value_heads": None}, 2 * 32 * 128),
        ({**LLAMA, "head_dim": 192, "v_head_dim": 128}, 8 * (192 + 128)),
    ],
)
def test_a_token_takes_what_heads_or_latents_have(
    config: dict[str, Any], token_values: int
) -> None:
    assert {layer.token_values for layer in layers_of(config)} == {token_values}


def test_a_window_says_how_many_tokens_it_keeps() -> None:
    window, full, *_ = layers_of(GPT_OSS)

    assert window == Layer(kind=K.WINDOW, num_kv_heads=8, head_size=64, v_head_size=64, window=128)
    assert full == Layer(kind=K.FULL, num_kv_heads=8, head_size=64, v_head_size=64)


def test_layers_with_windows_may_have_heads_of_their_own() -> None:
    full, window = layers_of(
        {
            **LLAMA,
            "num_hidden_layers": 2,
            "hybrid_layer_pattern": [0, 1],
            "sliding_window": 128,
            "head_dim": 192,
            "v_head_dim": 128,
            "num_key_value_heads": 4,
            "swa_num_key_value_heads": 8,
        }
    )

    assert (full.token_values, window.token_values) == (4 * 320, 8 * 320)


def test_full_attention_may_have_heads_of_its_own() -> None:
    """Gemma 4: 512 values per head where every token is kept, and 256 in windows."""
    layers = layers_of({**LLAMA, "model_type": "gemma4_text", "num_global_key_value_heads": 2})

    assert {(layer.kind, layer.token_values) for layer in layers} == {
        (K.WINDOW, 2 * 8 * 256),
        (K.FULL, 2 * 2 * 512),
    }


def test_heads_may_differ_layer_by_layer() -> None:
    layers = layers_of({**LLAMA, "num_hidden_layers": 2, "num_key_value_heads": [8, 4]})
    assert [layer.num_kv_heads for layer in layers] == [8, 4]

    blocks = [
        {"attention": {"n_heads_in_group": 8}},
        {"attention": {"n_heads_in_group": 16}},
        {"attention": {"no_op": True}},
    ]
    nas = layers_of({**LLAMA, "num_hidden_layers": 3, "block_configs": blocks})
    assert [layer.num_kv_heads for layer in nas] == [4, 2, 0]


def test_the_last_layers_may_read_the_kv_of_others() -> None:
    layers = layers_of({**LLAMA, "num_kv_shared_layers": 10})

    assert [layer.reads_anothers for layer in layers] == [False] * 22 + [True] * 10
    assert layers[-1].token_values == 0


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_hidden_layers": 4},
        {**LLAMA, "layer_types": ["full_attention"]},
        {**LLAMA, "num_key_value_heads": [8]},
        {**LLAMA, "num_hidden_layers": {"text": 4}},
    ],
)
def test_a_file_that_says_too_little_is_an_error(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        layers_of(config)


def test_heads_that_are_stated_layer_by_layer_are_those() -> None:
    text = {**LLAMA, "model_type": "gemma4_text", "num_hidden_layers": 2, "head_dim": 256}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": None}
    text["per_layer_config"] = {"01": {"head_dim": 512, "num_key_value_heads": 2}}

    window, full = layers_of(text)

    assert (window.num_kv_heads, window.head_size) == (8, 256)
    assert (full.num_kv_heads, full.head_size) == (2, 512)


@pytest.mark.parametrize(("k_is_v", "num_heads"), [(True, 2), (False, 8)])
def test_gemma_4_has_other_heads_for_all_tokens_only_where_k_is_v(
    k_is_v: bool, num_heads: int
) -> None:
    text = {**LLAMA, "model_type": "gemma4_text", "attention_k_eq_v": k_is_v}

    layers = layers_of({**text, "num_global_key_value_heads": 2})

    assert {layer.num_kv_heads for layer in layers if layer.kind is K.FULL} == {num_heads}
