"""Models from what their config.json states."""

import pytest

from simulator.models.reading import read_model
from simulator.models.types import (
    ReadModel,
    num_active_parameters,
    num_layers,
    step_weight_bytes,
)
from tests.model_configs import (
    DEEPSEEK_V3,
    GEMMA_3_27B,
    GPT_OSS_20B,
    GPT_OSS_120B,
    GRANITE_4_H_SMALL,
    LLAMA_3_8B,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B_A3B,
    Config,
)

MIB = 1 << 20


def read(config: Config, **overrides) -> ReadModel:
    return read_model({**config, **overrides}, name="read", source="")


# Billions, as model cards state them: all, and for a token, where they say so. Qwen and DeepSeek
# count the embedding among the latter, OpenAI does not; Gemma's are of its language model.
STATED = [
    (LLAMA_3_8B, 8.03, None),
    (QWEN3_30B_A3B, 30.5, 3.3),
    (GPT_OSS_120B, 117.0, 5.1),
    (GPT_OSS_20B, 20.9, 3.6),
    (DEEPSEEK_V3, 671.0, 37.0),
    (GEMMA_3_27B, 27.0, None),
    (QWEN3_NEXT_80B_A3B, 80.0, 3.9),
    (GRANITE_4_H_SMALL, 32.0, 9.0),
]


@pytest.mark.parametrize(("config", "stated", "active"), STATED)
def test_parameters_are_those_of_the_model_cards(config, stated, active) -> None:
    model = read(config)
    of_a_token = num_active_parameters(model)
    if config in (QWEN3_30B_A3B, QWEN3_NEXT_80B_A3B, DEEPSEEK_V3):
        of_a_token += model.embedding.num

    assert model.num_parameters / 1e9 == pytest.approx(stated, rel=0.01)
    if active is not None:
        assert of_a_token / 1e9 == pytest.approx(active, rel=0.03)


# Layers that may leave, bytes of a token in each, and the others: number, window, MiB of state.
KEPT = [
    (LLAMA_3_8B, 32, 2 * 8 * 128 * 2, []),
    (QWEN3_30B_A3B, 48, 2 * 4 * 128 * 2, []),
    (GPT_OSS_120B, 18, 2 * 8 * 64 * 2, [(18, 128, 0)]),
    (DEEPSEEK_V3, 61, (512 + 64) * 2, []),
    (GEMMA_3_27B, 10, 2 * 16 * 128 * 2, [(52, 1024, 0)]),
    # A convolution's 3 of 8,192 values, and 32 heads of 128 x 128.
    (QWEN3_NEXT_80B_A3B, 12, 2 * 2 * 256 * 2, [(36, None, (3 * 8192 + 32 * 128 * 128) * 2)]),
    # 3 of 8,448 values, and 128 heads of 64 x 128.
    (GRANITE_4_H_SMALL, 4, 2 * 8 * 128 * 2, [(36, None, (3 * 8448 + 128 * 64 * 128) * 2)]),
]


@pytest.mark.parametrize(("config", "num_moving", "token_bytes", "others"), KEPT)
def test_layers_keep_what_their_kind_does(config, num_moving, token_bytes, others) -> None:
    model = read(config)
    moving = [alike for alike in model.layers if alike.may_leave]
    staying = [alike for alike in model.layers if not alike.may_leave]

    assert num_layers(model) == num_moving + sum(number for number, _, _ in others)
    assert sum(alike.num for alike in moving) == num_moving
    assert {alike.attention.bytes_per_token for alike in moving} == {token_bytes}
    assert others == [
        (alike.num, alike.attention.window if alike.attention else None, alike.state_bytes)
        for alike in staying
    ]


def test_the_first_layers_of_deepseek_have_no_experts() -> None:
    dense, sparse = read(DEEPSEEK_V3).layers

    assert (dense.num, dense.experts) == (3, None)
    assert (sparse.num, sparse.experts.num, sparse.experts.num_active) == (58, 256, 8)


def test_a_step_of_more_tokens_reads_more_experts() -> None:
    # One token reads 8 of 128 experts; of n it is 128 * (1 - (15/16)^n), and of many all.
    model = read(QWEN3_30B_A3B)
    (layers,) = model.layers
    rest = model.head.num_bytes + 48 * layers.weights.num_bytes
    each = layers.experts.weights.num_bytes

    assert step_weight_bytes(model, 1) == pytest.approx(rest + 48 * 8 * each)
    assert step_weight_bytes(model, 2) == pytest.approx(rest + 48 * 15.5 * each)
    everything = model.weight_bytes - model.embedding.num_bytes
    assert step_weight_bytes(model, 10_000) == pytest.approx(everything)


QUANTISED = [
    ({}, 16.0, False),
    ({"quant_method": "fp8"}, 8.0, True),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128, False),
    ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4 + 20 / 64, False),
    ({"quant_method": "gptq", "bits": 8, "group_size": 128}, 8.0, False),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4 + 20 / 64, False),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
        },
        8.0,
        True,
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}
            },
        },
        4 + 20 / 32,
        False,
    ),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5, False),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8.0, True),
]


@pytest.mark.parametrize(("quantised", "bits", "in_fp8"), QUANTISED)
def test_weights_take_what_their_quantisation_says(quantised, bits, in_fp8) -> None:
    model = read(LLAMA_3_8B, quantization_config=quantised)
    (layers,) = model.layers

    assert 8 * layers.weights.num_bytes / layers.weights.num == pytest.approx(bits)
    assert model.embedding.num_bytes == 2 * model.embedding.num
    assert model.computes_in_fp8 == in_fp8


def test_mxfp4_is_of_the_experts_alone() -> None:
    model = read(GPT_OSS_120B)
    layers = model.layers[0]

    assert 8 * layers.experts.weights.num_bytes / layers.experts.weights.num == 4.25
    assert layers.weights.num_bytes == 2 * layers.weights.num
    assert model.weight_bytes / 1e9 == pytest.approx(65.2, rel=0.01)


def test_what_is_left_out_by_name_stays_as_it_is() -> None:
    left_out = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn"]}
    whole, part = (
        read(LLAMA_3_8B, quantization_config=one) for one in ({"quant_method": "fp8"}, left_out)
    )
    heads = 4096 * (2 * 32 + 2 * 8) * 128

    assert part.weight_bytes - whole.weight_bytes == 32 * heads


def test_an_unknown_quantisation_is_said_to_be_a_guess() -> None:
    model = read(LLAMA_3_8B, quantization_config={"quant_method": "squeezed"})

    assert model.weight_bytes == read(LLAMA_3_8B).weight_bytes
    assert any("squeezed" in guess for guess in model.guesses)


def test_float32_takes_four_bytes() -> None:
    model = read(LLAMA_3_8B, torch_dtype="float32")

    assert model.weight_bytes == 4 * model.num_parameters
    assert model.layers[0].attention.bytes_per_token == 2 * 8 * 128 * 4


def test_a_tied_head_is_the_embedding() -> None:
    tied, untied = (read(LLAMA_3_8B, tie_word_embeddings=one) for one in (True, False))

    assert untied.num_parameters - tied.num_parameters == 128256 * 4096
    assert step_weight_bytes(tied, 1) == step_weight_bytes(untied, 1)


REFUSED = [
    ({"sliding_window": 4096, "model_type": "mistral"}, "attends to all tokens"),
    ({"num_attention_heads": None}, "num_attention_heads"),
    ({"layer_types": ["hybrid"] * 32}, "attention and a state in one layer is not simulated"),
    ({"index_topk": 2048}, r"sparse attention is not simulated"),
    ({"num_kv_shared_layers": 4}, "another layer's KV"),
    ({"layer_types": ["full_attention", "mamba"] * 16}, "states of model type 'llama'"),
    (
        {
            "layer_types": ["full_attention", "sliding_attention"] * 16,
            "sliding_window": 128,
            "swa_head_dim": 96,
        },
        "unlike sizes",
    ),
]


@pytest.mark.parametrize(("stated", "said"), REFUSED)
def test_what_cannot_be_simulated_is_refused_by_name(stated, said) -> None:
    with pytest.raises(ValueError, match=said):
        read(LLAMA_3_8B, **stated)
