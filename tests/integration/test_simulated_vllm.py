"""The simulator's `vllm` is vLLM: the same traces through vLLM's own scheduler, without a model.

Every step takes one second, so that both count steps.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import set_current_vllm_config
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from lab.known_drafts import known_drafts
from lab.models import exactness_model
from services.executor.engine.config import make_config
from services.executor.settings import ExecutorSettings
from simulator.device.drafts import Drafts
from simulator.engine.vllm import VllmOptions
from simulator.workload import HASHED_TOKENS, ArrivingRequest
from tests.vllm_traces import BLOCK_SIZE, TRACE, Engine, Seen, asked, drive, simulated, token_of

NUM_DRAFTS = 3


class Config:
    """vLLM's configuration, which cannot be printed."""

    def __init__(self, config: Any) -> None:
        self.vllm = config


def configured(*arguments: str) -> Config:
    settings = ExecutorSettings(
        model=str(exactness_model()),
        max_model_len=2_048,
        block_size=BLOCK_SIZE,
        engine_args=list(arguments),
    )
    return Config(make_config(settings))


@pytest.fixture(scope="module")
def config() -> Config:
    return configured()


@pytest.fixture(scope="module")
def drafting_config() -> Config:
    drafts = known_drafts(num_drafts=NUM_DRAFTS)
    return configured("--speculative-config", json.dumps(drafts))


class Vllm:
    """vLLM's scheduler, and a model that knows what comes next, as a drafter does at times."""

    def __init__(self, engine: Engine, config: Any) -> None:
        self._drafts = engine.drafts
        given = config.scheduler_config
        given.watermark = engine.vllm.watermark
        given.scheduler_reserve_full_isl = engine.vllm.scheduler_reserve_full_isl
        given.max_num_seqs = engine.max_num_seqs
        given.max_num_batched_tokens = engine.max_num_batched_tokens
        config.cache_config.num_gpu_blocks = engine.num_blocks + 1  # vLLM keeps one for itself
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32
        )
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=engine.num_blocks + 1,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.live: dict[str, tuple[ArrivingRequest, Request]] = {}
        self.num_cached: dict[str, int] = {}
        self.seen: dict[str, Seen] = {}

    def add(self, request: ArrivingRequest) -> None:
        made = Request(
            request_id=request.request_id,
            prompt_token_ids=[token_of(request, i) for i in range(request.num_prompt_tokens)],
            sampling_params=SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.live[request.request_id] = request, made
        self.scheduler.add_request(made)

    def step(self, end_s: float) -> None:
        output = self.scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        for new in output.scheduled_new_reqs:
            self.num_cached.setdefault(new.req_id, new.num_computed_tokens)
        sampled = []
        for request_id in ids:
            given, live = self.live[request_id]
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            complete = live.num_computed_tokens == live.num_tokens + len(drafts)
            sampled.append(self._accepted(given, live.num_tokens, drafts) if complete else [])
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=sampled,
            ),
        )
        self._draft([one for one, new in zip(ids, sampled, strict=True) if new])
        for request_id, (_, live) in list(self.live.items()):
            if live.is_finished():
                del self.live[request_id]
                self.seen[request_id] = Seen(
                    num_cached_tokens=self.num_cached[request_id],
                    num_preemptions=live.num_preemptions,
                    ended_s=end_s,
                )

    def _accepted(self, given: ArrivingRequest, start: int, drafts: Sequence[int]) -> list[int]:
        """Return the tokens from a position on: the right drafts, and one more."""
        right = [token_of(given, start + place) for place in range(len(drafts) + 1)]
        pairs = enumerate(zip(drafts, right, strict=False))
        num_right = next((n for n, (draft, token) in pairs if draft != token), len(drafts))
        return right[: num_right + 1]

    def _draft(self, request_ids: Sequence[str]) -> None:
        """Draft what follows: by the simulator's draws right, or another token."""
        if self._drafts is None:
            return
        drafts = []
        for request_id in request_ids:
            given, live = self.live[request_id]
            num_asked = given.num_output_tokens
            is_right = self._drafts.right_ones(num_asked, seed=f"0-{request_id}")
            is_right += [False] * NUM_DRAFTS  # behind its end
            first = live.num_output_tokens
            drafts.append(
                [
                    token_of(given, live.num_tokens + place) + (not is_right[first + place])
                    for place in range(NUM_DRAFTS)
                ]
            )
        self.scheduler.update_draft_token_ids(DraftTokenIds(list(request_ids), drafts))


def through_vllm(
    engine: Engine, requests: Sequence[ArrivingRequest], config: Config
) -> dict[str, Seen]:
    with set_current_vllm_config(config.vllm):
        return drive(Vllm(engine, config.vllm), requests)


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
