"""A snapshot whose parts do not fit each other is told apart, by the name of the field."""

import dataclasses
from typing import Any

import pytest

from services.placement.contradiction import find_contradiction
from services.placement.types import EngineShape, RequestId, RequestPhase, RequestState, Snapshot


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
        "num_prompt_tokens": 10,
        "num_output_tokens": 5,
        "num_computed_tokens": 15,
        "num_deposited_tokens": 5,
        "arrival_age_s": 2.0,
        "first_token_age_s": 2.0,
        "offloaded_layers": (0, 3),
    }
    return RequestState(**(values | overrides))


def make_snapshot(**overrides: Any) -> Snapshot:
    values = {
        "epoch": 1,
        "policy": "vllm",
        "seed": 0,
        "engine": make_engine(),
        "requests": (make_request(),),
        "num_free_blocks": 100,
    }
    return Snapshot(**(values | overrides))


def test_a_snapshot_at_every_limit_is_sound() -> None:
    # 15 computed = 10 + 5; 5 deposited = 5 generated; layer 3 is the last of 4; all blocks free.
    assert find_contradiction(make_snapshot(engine=make_engine(layers_per_group=4))) is None


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"num_computed_tokens": 16}, "num_computed_tokens"),
        ({"num_deposited_tokens": 6}, "num_deposited_tokens"),
        ({"first_token_age_s": 2.5}, "first_token_age_s"),
        ({"offloaded_layers": (1, 1)}, "offloaded_layers"),
        ({"offloaded_layers": (2, 1)}, "offloaded_layers"),
        ({"offloaded_layers": (4,)}, "offloaded_layers"),
    ],
)
def test_one_step_beyond_a_limit_names_the_requests_field(overrides, field) -> None:
    sound = make_request()
    bad = dataclasses.replace(sound, request_id=RequestId("b"), **overrides)

    contradiction = find_contradiction(make_snapshot(requests=(sound, bad)))

    assert contradiction is not None
    assert contradiction.field == f"requests[1].{field}"


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"engine": make_engine(layers_per_group=5)}, "engine.layers_per_group"),
        ({"num_free_blocks": 101}, "num_free_blocks"),
        ({"requests": (make_request(), make_request())}, "requests[1].request_id"),
    ],
)
def test_a_contradiction_of_the_engine_names_its_field(overrides, field) -> None:
    contradiction = find_contradiction(make_snapshot(**overrides))

    assert contradiction is not None
    assert contradiction.field == field
