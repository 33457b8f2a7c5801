"""The simulator's `vllm` is vLLM: the same traces through vLLM's own scheduler, without a model.

Every step takes one second, so that both count steps.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import set_current_vllm_config

from lab.known_drafts import known_drafts
from simulator.device.drafts import Drafts
from simulator.engine.vllm import VllmOptions
from simulator.workload import HASHED_TOKENS, ArrivingRequest
from tests.integration.traced_vllm import NUM_DRAFTS, Config, TracedVllm, configured
from tests.vllm_traces import BLOCK_SIZE, TRACE, Engine, Seen, asked, drive, simulated


@pytest.fixture(scope="module")
def config() -> Config:
    return configured()


@pytest.fixture(scope="module")
def drafting_config() -> Config:
    drafts = known_drafts(num_drafts=NUM_DRAFTS)
    return configured("--speculative-config", json.dumps(drafts))


def through_vllm(
    engine: Engine, requests: Sequence[ArrivingRequest], config: Config
) -> dict[str, Seen]:
    with set_current_vllm_config(config.vllm):
        return drive(TracedVllm(engine, config.vllm), requests)


@pytest.mark.parametrize("watermark", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("reserve", [True, False])
def test_hits_preemptions_and_ends_are_vllms(
    config: Config, watermark: float, reserve: bool
) -> None:
    options = VllmOptions(watermark=watermark, scheduler_reserve_full_isl=reserve)
    engine = Engine(num_blocks=60, vllm=options)

    found = simulated(engine, TRACE)

    assert found == through_vllm(engine, TRACE, config)
    assert sum(one.num_cached_tokens for one in found.values()) > 2_000
    assert any(one.num_preemptions for one in found.values()) or watermark


def test_a_preempted_request_finds_its_own_blocks(config: Config) -> None:
    """Who is alone with its prompt, too."""
    trace = [asked("old", 0.0, 300, 200), asked("new", 1.0, 300, 200)]
    engine = Engine(num_blocks=24)

    found = simulated(engine, trace)

    assert found == through_vllm(engine, trace, config)
    assert found["new"].num_preemptions
    assert found["new"].num_cached_tokens == 0
    without = simulated(engine, [replace(trace[0], num_output_tokens=1), trace[1]])
    assert without["new"].num_preemptions == 0


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("num_blocks", [60, 400])
def test_drafts_take_and_bring_what_vllms_do(
    drafting_config: Config, acceptance: float, num_blocks: int
) -> None:
    drafts = Drafts(num_drafts=NUM_DRAFTS, acceptance=acceptance)
    engine = Engine(num_blocks=num_blocks, max_num_batched_tokens=100, drafts=drafts)

    found = simulated(engine, TRACE)

    assert found == through_vllm(engine, TRACE, drafting_config)
    last_s = max(one.ended_s for one in found.values())
    without = simulated(replace(engine, drafts=None), TRACE)
    assert (last_s < max(one.ended_s for one in without.values())) == (acceptance > 0.0)


@st.composite
def traces(draw: st.DrawFn) -> list[ArrivingRequest]:
    requests, arrival_s = [], 0.0
    said: dict[str, int] = {}  # tokens of each conversation
    free_s: dict[str, float] = {}  # when its next turn may come
    for number in range(draw(st.integers(1, 9))):
        arrival_s += draw(st.sampled_from([0.0, 0.0, 1.0, 7.0, 300.0]))
        new, answer = draw(st.integers(1, 500)), draw(st.integers(1, 120))
        begins: dict[str, Any] = {}
        kind = draw(st.sampled_from(["alone", "hashed", "conversation"]))
        if kind == "hashed":
            path = draw(st.sampled_from([(1,), (1, 2), (3,)]))
            begins = {"prompt_hashes": path}
            new = min(new + HASHED_TOKENS * len(path), 1_300)
        elif kind == "conversation":
            name = draw(st.sampled_from("ab"))
            if arrival_s >= free_s.get(name, 0.0) and said.get(name, 0) < 700:
                begins = {"conversation": name}
                new += said.get(name, 0)
                said[name], free_s[name] = new + answer, arrival_s + 299.0
        requests.append(asked(f"r{number}", arrival_s, new, answer, **begins))
    return requests


@given(
    requests=traces(),
    num_blocks=st.integers(8, 140),
    max_num_seqs=st.integers(1, 8),
    budget=st.sampled_from([32, 100, 256, 1_000]),
    watermark=st.sampled_from([0.0, 0.02, 0.05, 0.2]),
    reserve=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_any_trace_is_scheduled_alike(
    config: Config,
    requests: list[ArrivingRequest],
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    watermark: float,
    reserve: bool,
) -> None:
    engine = Engine(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(budget, max_num_seqs),
        vllm=VllmOptions(watermark=watermark, scheduler_reserve_full_isl=reserve),
    )
    most = num_blocks - math.ceil(watermark * num_blocks)
    fitting = [
        one
        for one in requests
        if -(-(one.num_prompt_tokens + one.num_output_tokens) // BLOCK_SIZE) <= most
    ]

    assert simulated(engine, fitting) == through_vllm(engine, fitting, config)
