"""The simulator's OffloadingConnector is vLLM's: the same traces through vLLM's own, and scheduler.

Steps take one second and copies next to none: in both a store ends with the step after its own, a
load with its own.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from lab.models import exactness_model
from services.executor.engine.config import make_config
from services.executor.settings import ExecutorSettings
from simulator.engine.vllm import VllmOptions
from simulator.workload import HASHED_TOKENS, ArrivingRequest
from tests.vllm_traces import BLOCK_SIZE, TRACE, Engine, Seen, asked, simulated, token_of

SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)


class Config:
    """vLLM's configuration, which cannot be printed."""

    def __init__(self, config: Any) -> None:
        self.vllm = config


@pytest.fixture(scope="module")
def config() -> Config:
    given = ExecutorSettings(
        model=str(exactness_model()), max_model_len=2_048, block_size=BLOCK_SIZE
    )
    return Config(make_config(given))


class Vllm:
    """vLLM's scheduler and connector, without a worker: copies end as they would in no time."""

    def __init__(self, engine: Engine, config: Any) -> None:
        given = config.scheduler_config
        given.watermark = engine.vllm.watermark
        given.scheduler_reserve_full_isl = engine.vllm.scheduler_reserve_full_isl
        given.max_num_seqs = engine.max_num_seqs
        given.max_num_batched_tokens = engine.max_num_batched_tokens
        num_blocks = engine.num_blocks + 1  # vLLM keeps one for itself
        config.cache_config.num_gpu_blocks = num_blocks
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "cpu_bytes_to_use": engine.num_host_blocks * SPEC.page_size_bytes,
                "offload_prompt_only": engine.vllm.offload_prompt_only,
            },
        )
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], SPEC)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._stores: set[int] = set()  # of the newest step
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

    def step(self, now_s: float) -> float:
        """Schedule and end a step that begins at `now_s`; return when it ends: at once if empty."""
        output = self.scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        end_s = now_s + bool(ids)
        for new in output.scheduled_new_reqs:
            self.num_cached.setdefault(new.req_id, new.num_computed_tokens)
        sampled = []
        for request_id in ids:
            given, live = self.live[request_id]
            complete = live.num_computed_tokens == live.num_tokens
            sampled.append([token_of(given, live.num_tokens)] if complete else [])
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=sampled,
                kv_connector_output=self._copied(output.kv_connector_metadata),
            ),
        )
        for request_id, (_, live) in list(self.live.items()):
            if live.is_finished():
                del self.live[request_id]
                self.seen[request_id] = Seen(
                    num_cached_tokens=self.num_cached[request_id],
                    num_preemptions=live.num_preemptions,
                    ended_s=end_s,
                )
        return end_s

    def _copied(self, orders: Any) -> KVConnectorOutput:
        """Return that loads are done, and the stores of the step before or that are waited for."""
        flushed = set(orders.jobs_to_flush or ()) & orders.store_jobs.keys()
        ended = {*orders.load_jobs, *self._stores, *flushed}
        self._stores = orders.store_jobs.keys() - flushed
        return KVConnectorOutput(
            finished_recving={job.req_id for job in orders.load_jobs.values()},
            kv_connector_worker_meta=OffloadingWorkerMetadata(
                completed_jobs=dict.fromkeys(ended, 1)
            ),
        )

    @property
    def is_idle(self) -> bool:
        return not self.live and not self._stores


def through_vllm(
    engine: Engine, requests: Sequence[ArrivingRequest], config: Config
) -> dict[str, Seen]:
    """Run all requests; a step begins as soon as one is there."""
    with set_current_vllm_config(config.vllm):
        vllm, now_s, num_empty = Vllm(engine, config.vllm), -1.0, 0
        pending = sorted(requests, key=lambda request: request.arrival_s)
        while pending or not vllm.is_idle:
            if vllm.is_idle and pending[0].arrival_s > now_s:
                now_s = pending[0].arrival_s
                vllm.add(pending.pop(0))  # a step begins at once, without those who come with it
            else:
                while pending and pending[0].arrival_s <= now_s:
                    vllm.add(pending.pop(0))
            end_s = vllm.step(now_s)
            num_empty = num_empty + 1 if end_s == now_s else 0
            assert num_empty < 100, "vLLM makes no progress"
            now_s = end_s
        return vllm.seen


def through_simulator(engine: Engine, requests: Sequence[ArrivingRequest]) -> dict[str, Seen]:
    """Return the same of the simulator, without what copies take."""
    options = replace(engine.vllm, offloading_connector=True)
    found = simulated(replace(engine, vllm=options), requests)
    return {name: replace(one, ended_s=float(round(one.ended_s))) for name, one in found.items()}


@pytest.mark.parametrize("prompt_only", [True, False])
@pytest.mark.parametrize("reserve", [True, False])
@pytest.mark.parametrize("watermark", [0.0, 0.05])
def test_hits_preemptions_and_ends_are_vllms(
    config: Config, prompt_only: bool, reserve: bool, watermark: float
) -> None:
    options = VllmOptions(
        watermark=watermark,
        scheduler_reserve_full_isl=reserve,
        offload_prompt_only=prompt_only,
    )
    engine = Engine(num_blocks=60, num_host_blocks=400, vllm=options)

    found = through_simulator(engine, TRACE)

    assert found == through_vllm(engine, TRACE, config)
    without = simulated(engine, TRACE)
    assert sum(one.num_cached_tokens for one in found.values()) > sum(
        one.num_cached_tokens for one in without.values()
    )


@st.composite
def traces(draw: st.DrawFn) -> list[ArrivingRequest]:
    requests, arrival_s = [], 0.0
    said: dict[str, int] = {}  # tokens of each conversation
    free_s: dict[str, float] = {}  # when its next turn may come
    for number in range(draw(st.integers(2, 9))):
        arrival_s += draw(st.sampled_from([0.0, 1.0, 7.0, 300.0]))
        new, answer = draw(st.integers(1, 500)), draw(st.integers(1, 120))
        begins: dict[str, Any] = {}
        kind = draw(st.sampled_from(["alone", "hashed", "conversation", "conversation"]))
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
    num_blocks=st.integers(50, 140),
    max_num_seqs=st.integers(1, 8),
    budget=st.sampled_from([32, 256, 1_000]),
    prompt_only=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_any_trace_is_scheduled_alike(
    config: Config,
    requests: list[ArrivingRequest],
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    prompt_only: bool,
) -> None:
    """With a host that has room for all: when it has not, vLLM counts a use a step later."""
    engine = Engine(
        num_blocks=num_blocks,
        num_host_blocks=1_000,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(budget, max_num_seqs),
        vllm=VllmOptions(offload_prompt_only=prompt_only),
    )
    fitting = [
        one
        for one in requests
        if -(-(one.num_prompt_tokens + one.num_output_tokens) // BLOCK_SIZE) <= num_blocks
    ]

    assert through_simulator(engine, fitting) == through_vllm(engine, fitting, config)
