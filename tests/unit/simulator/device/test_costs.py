"""Data files and the roofline."""

from dataclasses import replace

import pytest

from simulator.deployment import Deployment
from simulator.device.costs import LinearCosts, Roofline, StepLoad
from simulator.device.hardware import (
    Assumptions,
    Device,
    Model,
    assumptions,
    data_file,
    device,
    device_names,
    model,
    model_names,
)

# Parameters as the models' cards state them, in billions.
STATED = {
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.02,
    "llama-2-70b": 68.98,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.55,
    "qwen2-7b": 7.62,
    "qwen2_5-32b": 32.76,
    "yi-34b": 34.39,
}


@pytest.mark.parametrize("name", model_names())
def test_parameter_counts_are_those_of_the_model_cards(name) -> None:
    # Norms and biases are not counted: below a thousandth.
    assert model(name).num_parameters / 1e9 == pytest.approx(STATED[name], rel=2e-3)


def test_every_figure_of_a_device_has_a_source() -> None:
    assert set(device_names()) == {
        "a5000", "a6000", "rtx-3090", "rtx-4090", "rtx-5090", "a10", "l20", "l4", "l40s",
        "a100", "a100-40", "v100", "h20", "h100", "h200", "b200", "mi300x",
    }  # fmt: skip
    for name in device_names():
        assert device(name).source
        assert device(name).link_bytes_per_s in data_file("devices.toml")["links"].values()


def unit_assumptions(**overrides) -> Assumptions:
    given = {
        "flops_efficiency": 0.5,
        "memory_efficiency": 0.5,
        "link_efficiency": 0.5,
        "copy_overhead_s": 0.0,
        "layer_overhead_s": 3.0,
        "outside_s": 7.0,
        "all_reduce_latency_s": 2.0,
        "copy_slowdown_frac": 0.0,
        "draft_frac": 0.0,
        "reserved_memory_frac": 0.5,
        "compute_noise_frac": 0.0,
        "link_noise_frac": 0.0,
    }
    return Assumptions(**(given | overrides))


# One head of size 2, hidden size 2, MLP 1: (2 + 2) * 2 * 2 + 3 * 2 * 1 = 22 weights in a layer,
# 2 * 5 = 10 in the head, 2 * 2 * 2 = 8 bytes of KV per token and layer.
TINY = Model(
    name="tiny",
    num_hidden_layers=3,
    hidden_size=2,
    intermediate_size=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=2,
    vocab_size=5,
    source="",
)
UNIT = Device(
    title="unit",
    memory_bytes=1_000,
    memory_bytes_per_s=2.0,
    flops_per_s=20.0,
    link_bytes_per_s=4.0,
    peer_bytes_per_s=8.0,
    source="",
)


def make_roofline(**overrides) -> Roofline:
    given = {"model": TINY, "device": UNIT, "assumptions": unit_assumptions()}
    return Roofline(**(given | overrides))


def test_a_decode_is_bound_by_memory() -> None:
    # 1 byte/s, 10 FLOP/s reached. Weights: 22 * 2 = 44 bytes against 44 FLOPs. Attention over 10
    # tokens: 80 bytes against 4 * 10 * 2 = 80 FLOPs. 44 + 80 + 3.
    load = StepLoad(num_decodes=1, num_context_tokens=10)

    assert make_roofline().layer_s(load) == pytest.approx(127.0)
    assert make_roofline().outside_s(load) == pytest.approx(7.0 + 20.0)


def test_a_long_prompt_is_bound_by_flops() -> None:
    # 100 tokens: 2 * 22 * 100 = 4400 FLOPs at 10/s. Attention: 100 * 101 / 2 = 5050 pairs, 40400
    # FLOPs at 10/s, against 800 bytes. 440 + 4040 + 3.
    assert make_roofline().layer_s(StepLoad(chunks=((100, 0),))) == pytest.approx(4483.0)


def test_two_gpus_halve_the_work_and_add_two_all_reduces() -> None:
    # With a second KV head 30 weights, 60 bytes, and 160 of KV: work 220 / 2 = 110, overhead 3, and
    # twice 2 s + 2 * (1 / 2) * 4 bytes at 4 bytes/s.
    load = StepLoad(num_decodes=1, num_context_tokens=10)
    roofline = make_roofline(num_devices=2, model=replace(TINY, num_key_value_heads=2))

    assert roofline.layer_s(load) == pytest.approx(110 + 3 + 2 * (2 + 1))


def test_gpus_that_outnumber_the_kv_heads_read_the_same_kv() -> None:
    # One KV head on two GPUs: weights 44 / 2, KV 80 on each.
    load = StepLoad(num_decodes=1, num_context_tokens=10)

    assert make_roofline(num_devices=2).layer_s(load) == pytest.approx(22 + 80 + 3 + 2 * (2 + 1))


def test_all_reduces_take_the_copies_link_where_gpus_have_none_of_their_own() -> None:
    # Of 4 bytes each of two devices sends 2 * (1 / 2) * 4.
    load = StepLoad(num_decodes=1, num_context_tokens=10)
    shared = replace(UNIT, peer_bytes_per_s=UNIT.link_bytes_per_s)

    assert make_roofline(num_devices=2, device=shared).reduce_bytes(load) == 8
    assert make_roofline(num_devices=2).reduce_bytes(load) == 0
    assert make_roofline(device=shared).reduce_bytes(load) == 0


def test_a_linear_profile_is_the_emulated_devices_formula() -> None:
    costs = LinearCosts(layer_base_s=1.0, per_token_s=0.1, per_context_token_s=0.01)

    assert costs.layer_s(
        StepLoad(num_decodes=2, num_context_tokens=30, chunks=((5, 20),))
    ) == pytest.approx(1.0 + 0.7 + 0.55)


def test_the_pool_is_what_memory_holds_beside_the_weights() -> None:
    # 500 bytes usable, weights (3 * 22 + 2 * 10) * 2 = 172: 328 left; a position of 16 tokens
    # in 3 layers takes 3 * 16 * 8 = 384 bytes, of 4 tokens 96: 3 positions.
    deployment = Deployment(
        model=TINY, device=UNIT, assumptions=unit_assumptions(), block_size=4, host_memory_bytes=960
    )

    assert deployment.shape().num_blocks == 9
    assert deployment.shape().num_host_blocks == 30
    # The longest request that fits: 12 tokens. 3 layers of 44 + 96 + 3, and 27 outside.
    assert deployment.base_tbt_s() == pytest.approx(3 * 143 + 27)


def test_a_model_that_leaves_no_room_is_refused() -> None:
    whole = Deployment(model=model("llama-3-70b"), device=device("h100"), assumptions=assumptions())

    with pytest.raises(ValueError, match="141 GB of weights"):
        whole.shape()
