"""The simulator's OffloadingConnector is vLLM's: the same traces through vLLM's own, and scheduler.

Steps take one second and copies next to none: in both a store ends with the step after its own, a
load with its own.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from simulator.engine.vllm import VllmOptions
from simulator.workload import HASHED_TOKENS, ArrivingRequest
from tests.integration.traced_vllm import SPEC, Config, TracedVllm, configured
from tests.vllm_traces import BLOCK_SIZE, TRACE, Engine, Seen, asked, simulated


@pytest.fixture(scope="module")
def config() -> Config:
    return configured()


class OffloadingVllm(TracedVllm):
    """vLLM's scheduler and connector, without a worker: copies end as they would in no time."""

    def __init__(self, engine: Engine, config: Any) -> None:
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "cpu_bytes_to_use": engine.num_host_blocks * SPEC.page_size_bytes,
                "offload_prompt_only": engine.vllm.offload_prompt_only,
            },
        )
        super().__init__(engine, config)
        self._stores: set[int] = set()  # of the newest step

    def step_at(self, now_s: float) -> float:
        """Schedule and end a step that begins at `now_s`; return when it ends: at once if empty."""
        output = self.scheduler.schedule()
        end_s = now_s + bool(output.num_scheduled_tokens)
        self.end(output, end_s)
        return end_s

    def copied(self, output: SchedulerOutput) -> KVConnectorOutput:
        """Return that loads are done, and the stores of the step before or that are waited for."""
        orders: Any = output.kv_connector_metadata
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
        vllm, now_s, num_empty = OffloadingVllm(engine, config.vllm), -1.0, 0
        pending = sorted(requests, key=lambda request: request.arrival_s)
        while pending or not vllm.is_idle:
            if vllm.is_idle and pending[0].arrival_s > now_s:
                now_s = pending[0].arrival_s
                vllm.add(pending.pop(0))  # a step begins at once, without those who come with it
            else:
                while pending and pending[0].arrival_s <= now_s:
                    vllm.add(pending.pop(0))
            end_s = vllm.step_at(now_s)
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
