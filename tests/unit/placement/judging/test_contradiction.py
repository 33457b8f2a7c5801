"""A snapshot whose parts do not fit each other is told apart, by the name of the field."""

import dataclasses
from typing import Any

import pytest

from services.placement.judging.contradiction import find_contradiction
from services.placement.types import (
    EngineShape,
    PolicyParameters,
    PrefixId,
    PrefixState,
    RequestId,
    RequestPhase,
    RequestState,
    Snapshot,
)


def make_engine(**overrides: Any) -> EngineShape:
    values = {
        "num_layers": 4,
        "layers_per_group": 1,
        "block_size": 16,
        "num_blocks": 100,
        "block_bytes": 4_096,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2_048,
    }
    return EngineShape(**(values | overrides))


def make_request(**overrides: Any) -> RequestState:
    values = {
        "request_id": RequestId("a"),
        "phase": RequestPhase.DECODING,
        "num_prompt_tokens": 32,
        "num_output_tokens": 5,
        "num_computed_tokens": 37,
        "num_deposited_tokens": 5,
        "offloaded_layers": (0, 3),
        "num_prefetch_buffers": 2,
        "num_blocks": (3, 3, 3, 3),
        "num_host_blocks": (2, 2, 2, 2),
    }
    return RequestState(**(values | overrides))


def make_snapshot(**overrides: Any) -> Snapshot:
    values = {
        "epoch": 1,
        "policy": "vllm",
        "seed": 0,
        "engine": make_engine(),
        "requests": (make_request(),),
        "num_free_blocks": 88,
    }
    return Snapshot(**(values | overrides))


def test_a_snapshot_at_every_limit_is_sound() -> None:
    # 37 computed = 32 + 5; 5 deposited = 5 generated; layer 3 is the last of 4; 2 full blocks of 16
    # are mirrored; 100 blocks = 88 free + 12 held.
    assert find_contradiction(make_snapshot()) is None


def test_one_group_of_all_layers_is_sound() -> None:
    request = make_request(
        offloaded_layers=(0, 1, 2, 3), num_prefetch_buffers=1, num_blocks=(3,), num_host_blocks=(2,)
    )
    engine = make_engine(layers_per_group=4)

    assert find_contradiction(make_snapshot(engine=engine, requests=(request,))) is None


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"num_computed_tokens": 38}, "num_computed_tokens"),
        ({"num_deposited_tokens": 6}, "num_deposited_tokens"),
        ({"offloaded_layers": (1, 1)}, "offloaded_layers"),
        ({"offloaded_layers": (2, 1)}, "offloaded_layers"),
        ({"offloaded_layers": (0, 4)}, "offloaded_layers"),
        ({"num_prefetch_buffers": 3}, "num_prefetch_buffers"),
        ({"num_blocks": (3, 3, 3)}, "num_blocks"),
        ({"num_host_blocks": (2, 2, 2, 3)}, "num_host_blocks"),
        ({"num_host_blocks": (2,)}, "num_host_blocks"),
        ({"paused_age_s": 1.0}, "paused_age_s"),
        ({"phase": RequestPhase.PAUSED}, "paused_age_s"),
        ({"predicted_min_output_tokens": 9}, "predicted_max_output_tokens"),
        (
            {"predicted_min_output_tokens": 9, "predicted_max_output_tokens": 8},
            "predicted_max_output_tokens",
        ),
    ],
)
def test_one_step_beyond_a_limit_names_the_requests_field(overrides, field) -> None:
    sound = make_request()
    bad = dataclasses.replace(sound, request_id=RequestId("b"), **overrides)
    roomy = make_engine(num_blocks=1_000)

    contradiction = find_contradiction(make_snapshot(engine=roomy, requests=(sound, bad)))

    assert contradiction is not None
    assert contradiction.field == f"requests[1].{field}"


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"engine": make_engine(layers_per_group=5)}, "engine.layers_per_group"),
        ({"num_free_blocks": 89}, "num_free_blocks"),
        ({"engine": make_engine(layers_per_group=2)}, "requests[0].offloaded_layers"),
        ({"parameters": PolicyParameters(min_window=3, max_window=2)}, "parameters.max_window"),
        (
            {"parameters": PolicyParameters(min_pause_s=3.0, max_pause_s=2.0)},
            "parameters.max_pause_s",
        ),
        (
            {"engine": make_engine(num_blocks=1_000), "requests": (make_request(),) * 2},
            "requests[1].request_id",
        ),
    ],
)
def test_a_contradiction_of_the_engine_names_its_field(overrides, field) -> None:
    contradiction = find_contradiction(make_snapshot(**overrides))

    assert contradiction is not None
    assert contradiction.field == field


def make_prefix(**overrides: Any) -> PrefixState:
    values = {
        "prefix_id": PrefixId("t"),
        "num_tokens": 32,
        "offloaded_layers": (3,),
        "num_prefetch_buffers": 1,
        "num_blocks": (2, 2, 2, 2),
        "num_host_blocks": (2, 2, 2, 2),
    }
    return PrefixState(**(values | overrides))


def sharing(**overrides: Any) -> Snapshot:
    """Return a snapshot whose request begins with a prefix: 80 blocks free, 12 and 8 held."""
    request = make_request(prefix_ids=(PrefixId("t"),))
    values = {"requests": (request,), "prefixes": (make_prefix(),), "num_free_blocks": 80}
    return make_snapshot(**(values | overrides))


def test_a_prefix_at_every_limit_is_sound() -> None:
    assert find_contradiction(sharing()) is None


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"num_free_blocks": 81}, "num_free_blocks"),
        ({"prefixes": ()}, "requests[0].prefix_ids"),
        ({"requests": (make_request(prefix_ids=("t", "t")),)}, "requests[0].prefix_ids"),
        ({"prefixes": (make_prefix(), make_prefix(num_blocks=()))}, "prefixes[1].prefix_id"),
        ({"requests": (make_request(request_id="t"),)}, "prefixes[0].prefix_id"),
        ({"prefixes": (make_prefix(num_tokens=33),)}, "prefixes[0].num_tokens"),
        ({"prefixes": (make_prefix(offloaded_layers=(4,)),)}, "prefixes[0].offloaded_layers"),
        ({"prefixes": (make_prefix(num_prefetch_buffers=0),)}, "prefixes[0].num_prefetch_buffers"),
        ({"prefixes": (make_prefix(num_blocks=(2,)),)}, "prefixes[0].num_blocks"),
        ({"prefixes": (make_prefix(num_host_blocks=(3,) * 4),)}, "prefixes[0].num_host_blocks"),
    ],
)
def test_a_contradiction_of_a_prefix_names_its_field(overrides, field) -> None:
    contradiction = find_contradiction(sharing(**overrides))

    assert contradiction is not None
    assert contradiction.field == field
