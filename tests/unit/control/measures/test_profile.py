"""The engine's profile from steps that a test makes up."""

from dataclasses import replace
from typing import Any

import pytest

from services.control.measures.profile import MIN_DECODE_STEPS, OnlineProfile
from services.control.types import StepSample

DECODE = StepSample(
    step_s=0.024,
    layer_s=2e-3,
    stall_s=4e-3,
    num_tokens=4,
    num_context_tokens=1_000,
    num_prefill_tokens=0,
    num_prefill_pairs=0,
)
PROMPT = replace(
    DECODE,
    step_s=0.5,
    layer_s=0.06,
    num_tokens=1_000,
    num_prefill_tokens=1_000,
    num_prefill_pairs=500_000,
)


def chunk(num_tokens: int, before: int) -> StepSample:
    """Return a step that computes part of a prompt: 0.4 ms per token, 1 us per pair."""
    num_pairs = num_tokens * before + num_tokens * (num_tokens + 1) // 2
    return replace(
        PROMPT,
        step_s=4e-4 * num_tokens + 1e-6 * num_pairs,
        stall_s=0.0,
        num_tokens=num_tokens,
        num_prefill_tokens=num_tokens,
        num_prefill_pairs=num_pairs,
    )


def profiled(*samples: StepSample, **options: Any) -> OnlineProfile:
    profile = OnlineProfile(num_layers=8, **options)
    for sample in samples:
        profile.add(sample)
    return profile


def test_there_is_no_profile_before_enough_decode_steps() -> None:
    profile = profiled(*[DECODE] * (MIN_DECODE_STEPS - 1), *[PROMPT] * 10)
    assert profile.profile() is None

    profile.add(DECODE)

    assert profile.profile() is not None


def test_a_step_is_split_into_layers_stalls_and_the_rest() -> None:
    found = profiled(*[DECODE] * 8).profile()
    assert found is not None

    # 24 ms - 8 layers * 2 ms - 4 ms of stalls = 4 ms
    assert found.outside_layers_s == pytest.approx(4e-3)
    assert found.layer_s(4, 1_000) == pytest.approx(2e-3)
    assert found.mean_tpot_s == pytest.approx(0.024)


def test_prompts_do_not_touch_the_decode_figures() -> None:
    without, with_prompts = profiled(*[DECODE] * 8), profiled(*[DECODE, PROMPT] * 8)

    first, second = without.profile(), with_prompts.profile()
    assert first is not None
    assert second is not None

    assert replace(second, prefill_s_per_token=0.0) == first


def test_a_prompts_token_costs_its_step_less_stalls_and_the_decodes_beside_it() -> None:
    alone = profiled(*[DECODE] * 8, PROMPT).profile()
    mixed = profiled(*[DECODE] * 8, replace(PROMPT, num_tokens=1_004)).profile()
    assert alone is not None
    assert mixed is not None

    assert alone.prefill_s_per_token == pytest.approx((0.5 - 0.004) / 1_000)
    assert mixed.prefill_s_per_token == pytest.approx((0.5 - 0.004 - 0.024) / 1_000)


def test_a_device_that_slows_down_is_followed_within_a_few_steps() -> None:
    slow = replace(DECODE, layer_s=4e-3)

    found = profiled(*[DECODE] * 100, *[slow] * 10).profile()
    assert found is not None

    assert found.layer_s(4, 1_000) == pytest.approx(4e-3, rel=0.1)


def test_steps_whose_layers_were_not_measured_say_nothing() -> None:
    assert not profiled(*[replace(DECODE, layer_s=0.0)] * 50).is_ready


def test_a_prompts_token_takes_longer_for_each_that_it_attends_to() -> None:
    chunks = [chunk(n, before) for before in (0, 512, 1_024, 4_096) for n in (128, 256, 512)]
    cost = profiled(*[DECODE] * 8, *chunks).prompt_cost
    assert cost is not None

    for first, last in ((0, 1_000), (0, 30_000), (29_000, 30_000)):
        pairs = (last * last - first * first) / 2
        assert cost.seconds(first, last) == pytest.approx(
            4e-4 * (last - first) + 1e-6 * pairs, rel=0.05
        )


def test_prompts_of_one_size_say_how_long_they_take_and_no_more() -> None:
    cost = profiled(*[DECODE] * 8, *[chunk(500, 0)] * 20).prompt_cost
    assert cost is not None

    # 0.4 ms and 250 pairs of 1 us each.
    assert cost.pair_s == 0.0
    assert cost.token_s == pytest.approx(0.65e-3, rel=0.01)


def test_a_request_that_decodes_is_charged_for_its_drafts_too() -> None:
    """Steps of 1 ms, 0.1 ms a row and 2 us a token of KV, four layers, four rows a request."""
    profile = OnlineProfile(num_layers=4)
    for number in range(200):
        num_requests = 1 + number % 7
        num_rows, context = 4 * num_requests, 500 * (1 + number % 5)
        layer_s = (1e-3 + 1e-4 * num_rows + 2e-6 * context) / 4
        profile.add(
            replace(
                DECODE,
                step_s=4 * layer_s,
                stall_s=0.0,
                layer_s=layer_s,
                num_tokens=num_rows,
                num_context_tokens=context,
                num_requests=num_requests,
            )
        )
    costs, planned = profile.costs(), profile.profile()

    assert profile.rows_per_request == 4.0
    assert costs is not None
    assert planned is not None
    assert costs.token_s == pytest.approx(4e-4, rel=0.05)
    assert planned.layer_s_per_token == pytest.approx(1e-4, rel=0.05)
