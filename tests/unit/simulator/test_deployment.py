"""What a model is on GPUs: blocks of every kind, tokens that the pool holds, what is said of it."""

from dataclasses import replace

import pytest

from services.placement.blocks import STATE
from simulator.comparison.sizing import Readers, room_for
from simulator.compose import check
from simulator.deployment import Deployment
from simulator.description import describe, full_link_ratio
from simulator.device.drafts import Drafts
from simulator.device.hardware import assumptions, device, model
from simulator.memory.room import pool_tokens
from simulator.models.reading import read_model
from tests.model_configs import (
    DEEPSEEK_V3,
    GEMMA_3_27B,
    GPT_OSS_20B,
    GPT_OSS_120B,
    LLAMA_3_8B,
    QWEN3_NEXT_80B_A3B,
    Config,
)

THREE = Drafts(num_drafts=3, acceptance=0.75, cost_frac=0.05)  # 2.73 tokens per step
GEMMA_4_HEADS = {
    "num_key_value_heads": 16,
    "head_dim": 256,
    "num_global_key_value_heads": 4,
    "global_head_dim": 512,
}


def make(config: Config, gpu: str = "h100", **overrides) -> Deployment:
    return Deployment(
        model=read_model(config, name="read", source=""),
        device=device(gpu),
        assumptions=assumptions(),
        **overrides,
    )


def test_windows_are_groups_that_stay() -> None:
    shape = make(GPT_OSS_120B).shape()

    assert (shape.num_groups, shape.side_windows) == (18, (128,) * 18)
    assert shape.block_bytes == 16 * 2 * 8 * 64 * 2


def test_layers_of_one_group_stay_together() -> None:
    shape = make(GEMMA_3_27B, layers_per_group=2).shape()

    assert (shape.num_groups, len(shape.side_windows)) == (5, 26)


def test_blocks_have_as_many_bytes_where_the_heads_of_windows_are_unlike_the_others() -> None:
    # As Gemma 4 31B: 16 heads of 256 in windows, 4 of 512 where all tokens are attended to.
    text = {**GEMMA_3_27B["text_config"], **GEMMA_4_HEADS}
    shape = make({**GEMMA_3_27B, "text_config": text}).shape()

    assert (shape.block_size, shape.side_block_size) == (32, 16)
    assert shape.block_bytes == 16 * 2 * 16 * 256 * 2


def test_a_block_is_as_large_as_a_state() -> None:
    # 1,097,728 bytes of state at 2,048 per token are 536 tokens: 34 blocks of 16.
    shape = make(QWEN3_NEXT_80B_A3B, num_devices=4).shape()
    single = make(QWEN3_NEXT_80B_A3B, gpu="b200").shape()

    assert single.side_windows == (STATE,) * 36
    assert single.block_size == 544
    # Four GPUs divide the states; of two KV heads two of them have the same.
    assert shape.block_size == 272
    assert shape.block_bytes == 272 * 2 * 2_048


def test_every_gpu_has_all_latents() -> None:
    shape = make(DEEPSEEK_V3, gpu="h200", num_devices=8).shape()

    assert shape.block_bytes == 8 * 16 * 576 * 2


def test_the_pool_holds_fewer_short_requests_than_tokens_of_a_long_one() -> None:
    # A request of 1,000 tokens has 10 * 63 blocks, and in each of 52 windows min(63, 64 + 1).
    shape = make(GEMMA_3_27B, pool_tokens=100_000).shape()

    assert pool_tokens(shape, request_tokens=1_000) == 62_500 * 1_000 // (62 * 63)
    # Of one request the windows have 52 * 65 blocks.
    assert pool_tokens(shape) == (62_500 - 52 * 65) // 10 * 16
    dense = Deployment(model=model("llama-3-8b"), device=device("h100"), assumptions=assumptions())
    assert pool_tokens(dense.shape(), request_tokens=7) == pool_tokens(dense.shape())


def test_readers_of_a_model_with_windows_take_turns() -> None:
    # 8,192 tokens and one: 513 * 18 blocks, and 18 * (ceil(128 / 16) + 1): 9,396 of 62,500 * 18.
    deployment = make(GPT_OSS_120B, pool_tokens=1_000_000, max_num_seqs=256)
    found = room_for(deployment, Readers(num_prompt_tokens=7_168))

    assert (found.num_held, found.limit, found.binds) == (119, "pool", "pool")
    assert found.num_readers == found.num_sustained > 1.5 * found.num_held
    # As many blocks as in the pool go to the host with each.
    shape = deployment.shape()
    num_blocks = 513 * 18 + 18 * 9
    assert found.num_kept == shape.num_host_blocks // num_blocks
    assert found.wanted_host_bytes == found.num_sustained * num_blocks * shape.block_bytes
    seated = replace(deployment, max_num_seqs=8)
    assert room_for(seated, Readers(num_prompt_tokens=7_168)).limit == "seats"


def test_lambda_is_that_of_a_full_pool() -> None:
    # The link moves 0.8 x 63 GB/s, memory 0.8 x 3.35 TB/s: where all weights are read but for the
    # embedding, and all of the pool, lambda is 63 / 3,350 x (1 + weights / pool), and what a step
    # has beside: 2 ms for the rest of it, 25 ms.
    deployment = make(LLAMA_3_8B, max_num_seqs=256)
    least = 63 / 3_350 * (1 + 15.0e9 / deployment.kv_bytes)

    assert least < full_link_ratio(deployment, 4_096) < least * 1.2


def test_what_is_read_and_what_is_guessed_is_said() -> None:
    lines = describe(make(GPT_OSS_20B, drafts=THREE), request_tokens=4_096)
    said = "\n".join(f"{word} {sentence}" for word, sentence in lines)

    assert "20.91 G parameters, 3.6 G of them for a token, 13.7 GB of weights" in said
    assert "24,576 bytes per token in 12 layers, which may leave" in said
    assert "12 with a window of 128 tokens" in said
    assert "lambda" in said
    guesses = [sentence for word, sentence in lines if word == "guess"]
    assert any("drawn evenly" in one for one in guesses)
    assert any("2.73 tokens per step" in one for one in guesses)


def test_a_pool_of_which_stock_vllm_makes_less_is_said() -> None:
    said = {
        name: dict(describe(make(model), request_tokens=32_768))["pool"]
        for name, model in (("padded", GEMMA_3_27B), ("even", GPT_OSS_20B))
    }

    assert "in stock vLLM, which pads" in said["padded"]
    assert "stock" not in said["even"]


def test_fp8_on_a_device_without_it_is_said() -> None:
    said = [
        sentence
        for _, sentence in describe(make(DEEPSEEK_V3, "h200", num_devices=8), request_tokens=4_096)
    ]
    assert any("on 8 GPUs each" in one for one in said)
    assert not any("no FP8" in one for one in said)
    bare = make(DEEPSEEK_V3, "a100", num_devices=16)
    assert any("no FP8" in one for _, one in describe(bare, request_tokens=4_096))


def test_what_drafts_bring_is_less_what_they_take() -> None:
    plain, drafted = (make(GPT_OSS_20B, drafts=drafts) for drafts in (None, THREE))

    assert THREE.tokens_per_step == pytest.approx(1 + 0.75 + 0.75**2 + 0.75**3)
    assert 1.3 < plain.base_tbt_s() / drafted.base_tbt_s() < THREE.tokens_per_step


def test_readers_of_what_is_drafted_are_more() -> None:
    # Turns are limited by time: a reader takes a part of it that the tokens of a step divide.
    few, more = (
        room_for(make(LLAMA_3_8B, drafts=drafts), Readers(num_prompt_tokens=7_168))
        for drafts in (None, THREE)
    )

    assert few.num_held >= more.num_held  # drafts have room, too
    assert more.num_sustained > 1.5 * few.num_sustained


@pytest.mark.parametrize(
    ("policy", "said"),
    [("ellm", "does not work with windows"), ("lab.policies.presets:HCACHE", "of a name here")],
)
def test_what_a_policy_cannot_do_with_a_model_is_refused(policy, said) -> None:
    with pytest.raises(ValueError, match=said):
        check(make(GPT_OSS_20B), policy)
