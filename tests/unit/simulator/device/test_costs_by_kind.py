"""The roofline of layers unlike each other, and of steps that verify drafted tokens."""

from dataclasses import replace

import pytest

from simulator.device.costs import LinearCosts, Roofline, StepLoad
from simulator.device.hardware import Device, assumptions
from simulator.models.types import Attention, Experts, Layers, ReadModel, Weights

# 1 byte/s and 10 FLOP/s are reached; nothing else takes time.
UNIT = Device(
    title="unit",
    memory_bytes=1_000,
    memory_bytes_per_s=1.0,
    flops_per_s=10.0,
    link_bytes_per_s=4.0,
    peer_bytes_per_s=8.0,
    source="",
)
WHOLE = replace(
    assumptions(),
    flops_efficiency=1.0,
    memory_efficiency=1.0,
    layer_overhead_s=0.0,
    all_reduce_latency_s=0.0,
    outside_s=0.0,
)
WEIGHTS = Weights(num=20, num_bytes=40)
ATTENTION = Attention(
    bytes_per_token=8, flops_per_pair=8, prompt_flops_per_pair=8, num_shards=1, window=0
)
FULL = Layers(num=2, weights=WEIGHTS, attention=ATTENTION)
WINDOW = Layers(num=4, weights=WEIGHTS, attention=replace(ATTENTION, window=5))


def make_roofline(*layers: Layers, device: Device = UNIT, **overrides) -> Roofline:
    model = ReadModel(
        name="unit",
        source="",
        hidden_size=2,
        layers=layers,
        embedding=WEIGHTS,
        head=WEIGHTS,
        is_tied=True,
        computes_in_fp8=False,
        max_model_len=0,
        precision="",
    )
    model = replace(model, **overrides)
    return Roofline(model=model, device=device, assumptions=WHOLE)


def test_a_layer_has_its_share_of_those_that_stay() -> None:
    # Two windows to each full layer: 40 + 10 * 8 bytes, and 2 * (40 + 5 * 8).
    load = StepLoad(num_decodes=1, num_context_tokens=10)

    assert make_roofline(FULL, WINDOW).layer_s(load) == pytest.approx(120 + 2 * 80)


def test_requests_within_a_window_read_what_they_have() -> None:
    # 3 and 5 of 3 and 17 tokens; alike ones of 20 together 5 each.
    one = StepLoad(num_decodes=2, num_context_tokens=20, contexts=(3, 17))
    alike = replace(one, contexts=())

    assert (one.num_read_tokens(5), alike.num_read_tokens(5)) == (8, 10)
    assert one.num_read_tokens(0) == 20


@pytest.mark.parametrize("window", [1, 3, 5, 8, 100])
@pytest.mark.parametrize("chunk", [(4, 0), (4, 2), (1, 7), (6, 20)])
def test_a_chunk_attends_to_no_more_than_a_window(chunk, window) -> None:
    num_tokens, before = chunk
    load = StepLoad(chunks=(chunk,))
    attended = [min(before + place + 1, window) for place in range(num_tokens)]
    read = {at for at in range(before + num_tokens) if at > before - window}

    assert load.num_prompt_pairs(window) == sum(attended)
    assert load.num_read_tokens(window) == len(read)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    # Of 4 experts of 100 bytes one token reads 2, two read 4 * (1 - 1/4) = 3.
    experts = Experts(num=4, num_active=2, weights=Weights(num=50, num_bytes=100))
    roofline = make_roofline(replace(FULL, attention=replace(ATTENTION), experts=experts))

    assert roofline.layer_s(StepLoad(num_decodes=1)) == pytest.approx(40 + 200)
    assert roofline.layer_s(StepLoad(num_decodes=2)) == pytest.approx(40 + 300)
    # 50 tokens: 2 * 50 * 2 * 50 FLOPs of experts at 10/s, and 2 * 20 * 50 beside.
    assert roofline.layer_s(StepLoad(num_decodes=50)) == pytest.approx(200 + 1_000)


def test_a_state_is_read_and_written() -> None:
    state = Layers(num=2, weights=WEIGHTS, state_bytes=30)
    roofline = make_roofline(FULL, state)

    assert roofline.layer_s(StepLoad(num_decodes=2)) == pytest.approx(40 + 40 + 2 * 2 * 30)


def test_latents_are_expanded_for_prompts_only() -> None:
    # 10 pairs of a decode at 80 FLOPs, against 80 bytes; a chunk of 4 has 10 pairs of 20 FLOPs.
    latent = replace(
        FULL, attention=replace(ATTENTION, flops_per_pair=80, prompt_flops_per_pair=20)
    )
    roofline = make_roofline(latent)

    assert roofline.layer_s(StepLoad(num_decodes=1, num_context_tokens=10)) == pytest.approx(120)
    # Its products are 2 * 20 * 4 FLOPs, shorter than the weights' 40 bytes; KV of 4 tokens 32.
    assert roofline.layer_s(StepLoad(chunks=((4, 0),))) == pytest.approx(40 + 32)


def test_products_in_fp8_run_at_its_rate_where_a_device_has_one() -> None:
    many = StepLoad(num_decodes=100)
    twice = replace(UNIT, fp8_flops_per_s=20.0)

    assert make_roofline(FULL, computes_in_fp8=True).layer_s(many) == pytest.approx(400)
    assert make_roofline(FULL, device=twice).layer_s(many) == pytest.approx(400)
    assert make_roofline(FULL, device=twice, computes_in_fp8=True).layer_s(many) == pytest.approx(
        200
    )


def test_drafts_are_computed_like_other_tokens() -> None:
    # One request and 3 drafts: 4 rows; a chunk of 6 adds its 6.
    costs = LinearCosts(layer_base_s=1.0, per_token_s=0.5)
    verifying = StepLoad(num_decodes=1, num_drafts=3)

    assert costs.layer_s(verifying) == pytest.approx(1.0 + 4 * 0.5)
    assert costs.layer_s(replace(verifying, chunks=((6, 0),))) == pytest.approx(1.0 + 10 * 0.5)


def test_what_verifies_reads_each_requests_kv_once_and_attends_with_each_draft() -> None:
    load = StepLoad(num_decodes=2, num_context_tokens=24, contexts=(4, 20))
    verifying = replace(load, num_drafts=6)

    for window, num_read in ((0, 24), (8, 12)):
        assert verifying.num_read_tokens(window) == load.num_read_tokens(window) == num_read
        assert verifying.num_decode_pairs(window) == 4 * load.num_decode_pairs(window)
