"""eLLM and its baselines: part of KV is computed anew, or comes back as hidden states."""

from dataclasses import replace

import pytest

from lab.policies.presets import full_name
from services.pacing.types import ServiceLevel
from services.placement.blocks import BlockGeometry
from services.placement.run.papers.ellm import EllmRules
from simulator.comparison.grid import Workload
from simulator.compose import make_engine, run_policy
from simulator.deployment import Deployment
from simulator.device.costs import LinearCosts, Roofline, StepLoad
from simulator.device.hardware import assumptions, device, model
from simulator.engine.machine import Machine
from simulator.engine.planning import PlanningOptions
from simulator.engine.records import RunRecord
from simulator.engine.simulation import simulate
from simulator.hcache import way_back
from simulator.memory.kv import KVState
from simulator.workload import constant_length

# A pool of eight requests at their end; far from what the memory of an A100 holds.
SMALL = Deployment(
    model=model("llama-2-13b"),
    device=device("a100"),
    assumptions=assumptions(),
    layers_per_group=10,
    pool_tokens=4_000,
    max_num_batched_tokens=100_000,
)
GROUPED = replace(SMALL, model=model("llama-2-70b"), num_devices=4)  # eight queries share a KV head
LEVEL = ServiceLevel(slo_tpot_s=0.05)


def run(
    policy: str,
    *,
    rate_per_s: float,
    uncached_frac: float | None = None,
    on: Deployment = SMALL,
    seed: int = 1,
) -> RunRecord:
    workload = Workload(lengths=(constant_length(400), constant_length(60)), num_requests=16)
    requests = workload.requests(rate_per_s=rate_per_s, seed=seed, level=LEVEL)
    options = PlanningOptions(policy=full_name(policy), ellm=EllmRules(uncached_frac=uncached_frac))
    return run_policy(on, requests, options, seed=seed)


@pytest.mark.parametrize("on", [SMALL, GROUPED], ids=["13B", "70B"])
@pytest.mark.parametrize("rate_per_s", [1.0, 5.0, 20.0, 100.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_ellm_is_vllm_that_recomputes(on: Deployment, rate_per_s: float, seed: int) -> None:
    """As many tokens per second; where the batch has a few FLOPs left, it uses them."""
    ellm, vllm = (
        run(policy, rate_per_s=rate_per_s, on=on, seed=seed)
        for policy in ("ellm", "vllm-recompute")
    )

    assert ellm.end_s == pytest.approx(vllm.end_s, rel=0.01)


def test_a_ratio_of_its_own_costs_the_batch_its_pace() -> None:
    given = run("ellm", rate_per_s=100.0, uncached_frac=0.1)

    assert given.totals.num_recomputed_tokens > 0
    assert given.end_s > 1.4 * run("vllm-recompute", rate_per_s=100.0).end_s


@pytest.mark.parametrize("policy", ["vllm-recompute", "vllm-swap", "hcache", "ellm"])
def test_no_layer_leaves_the_pool_of_a_request_that_runs(policy: str) -> None:
    record = run(policy, rate_per_s=100.0)

    assert record.totals.offloaded_s == 0.0
    assert record.totals.num_loads == 0


def test_blocks_add_up_whatever_is_uncached() -> None:
    shape = replace(SMALL, pool_tokens=1_200).shape()
    costs = LinearCosts(layer_base_s=1e-3, per_token_s=1e-9)  # nearly free: much is uncached
    engine = make_engine(
        shape,
        Machine(costs=costs, link_bytes_per_s=1e9),
        PlanningOptions(policy="ellm"),
    )
    requests = Workload(
        lengths=(constant_length(300), constant_length(40)), num_requests=8
    ).requests(rate_per_s=100.0, seed=1, level=LEVEL)
    record = simulate(engine, requests, after_event=lambda event: engine.check_integrity())

    assert record.totals.num_recomputed_tokens > 0
    assert all(len(outcome.generated_s) == 40 for outcome in record.outcomes)


def test_an_uncached_position_has_one_block_for_all_groups() -> None:
    kv = KVState(request_id="a", geometry=BlockGeometry(num_groups=4, block_size=16))
    kv.grow(100)  # 7 rows, of which 6 are full

    kv.uncache(5, num_free=0)
    assert kv.num_owned == 4 * 2 + 5
    kv.uncache(9, num_free=0)
    assert kv.num_owned == 4 * 1 + 6
    kv.uncache(1, num_free=7)  # two positions of three more blocks each
    assert kv.num_owned == 4 * 3 + 4
    kv.check_integrity()


def test_a_step_computes_what_is_uncached_like_a_prompt_of_its_own() -> None:
    costs = Roofline(model=model("llama-2-13b"), device=device("a100"), assumptions=assumptions())
    beside = StepLoad(num_decodes=2, num_context_tokens=1_002, recomputed=(160, 32))
    prompts = StepLoad(num_decodes=2, num_context_tokens=1_002, chunks=((160, 0), (32, 0)))

    assert costs.layer_s(beside) == costs.layer_s(prompts)
    assert costs.outside_s(beside) == costs.outside_s(prompts)


def test_hidden_states_are_half_of_kv_where_every_head_has_its_own_and_more_than_it_else() -> None:
    many_heads = way_back(SMALL)
    grouped = way_back(replace(SMALL, model=model("llama-3-8b")))

    # The A100's compute is the bottleneck: some layers come back as KV.
    assert 0.5 < many_heads.link_frac < 0.7
    assert many_heads.compute_s > 0.0
    assert (grouped.link_frac, grouped.compute_s) == (1.0, 0.0)


def test_hidden_states_take_less_of_the_link() -> None:
    slow = replace(SMALL, device=device("h100")).with_link(2e9)
    workload = Workload(lengths=(constant_length(400), constant_length(200)), num_requests=16)
    requests = workload.requests(rate_per_s=100.0, seed=1, level=ServiceLevel())
    swap, hcache = (
        run_policy(slow, requests, PlanningOptions(policy=full_name(policy)), seed=1)
        for policy in ("vllm-swap", "hcache")
    )

    assert swap.totals.resumes == hcache.totals.resumes
    assert hcache.totals.resumes["load"] > 0
    assert hcache.totals.h2d_bytes < swap.totals.h2d_bytes
