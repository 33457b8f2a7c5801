"""Whatever is offloaded, moved or aborted: tokens identical to stock vLLM.

Six engines cover the options pairwise; `make test-exact` runs their product. Pools hold 40 % of
what full residency takes. Copies take their time before any byte appears, and what is not yet
there, or no longer owned, is NaN.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from services.executor.kv.options import GuardMode, KVOptions
from tests.exact import faults
from tests.exact.harness import (
    Arrival,
    EngineCase,
    Outcome,
    StepRunner,
    first_difference,
    make_prompt,
    stock,
)
from tests.exact.workloads import churn, every, fixed, mixed

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

SLOW_LINK = KVOptions(
    host_bytes=256 << 20,
    copy_latency_s=0.5e-3,
    h2d_bytes_per_s=1e9,
    d2h_bytes_per_s=1e8,
    restore_when_free_frac=0.02,
    integrity_guard=GuardMode.ALL,
    poison=True,
)
# All requests of `mixed` resident take 424 blocks of one layer.
BASE = EngineCase(num_blocks=168, kv=SLOW_LINK)
CASES = {
    "layers": BASE,
    "pairs-of-layers-in-small-chunks": replace(
        BASE,
        kv=replace(SLOW_LINK, layers_per_group=2, max_staging_buffers=1, host_memory="ring"),
        num_blocks=85,
        max_num_batched_tokens=97,
    ),
    "halves-asynchronous": replace(
        BASE,
        kv=replace(SLOW_LINK, layers_per_group=4, pin_bytes_per_s=256e6),  # ready after a second
        num_blocks=56,
        asynchronous=True,
    ),
    "tensor-parallel": replace(
        BASE, tensor_parallel_size=2, kv=replace(SLOW_LINK, max_staging_buffers=1)
    ),
    "pipeline-parallel": replace(BASE, pipeline_parallel_size=2, num_blocks=85),
}

# 30 full blocks in 8 layers are 240 blocks: more than any of the pools.
LONG = [
    Arrival(request_id="long", prompt=make_prompt(970, seed=41), num_output_tokens=24),
    Arrival(request_id="short", prompt=make_prompt(40, seed=42), num_output_tokens=24),
]
SAMPLED = [
    replace(arrival, sampling={"temperature": 1.0, "top_p": 0.9, "seed": 7, "logprobs": 2})
    for arrival in mixed()[1:5]
]


@dataclass(frozen=True)
class Reference:
    """What stock vLLM answers."""

    mixed: Outcome
    long: Outcome
    sampled: Outcome
    stopping: list[Arrival]  # `mixed`, each ending at a string of its own answer
    stopped: Outcome


@pytest.fixture(scope="module")
def reference() -> Reference:
    runner = StepRunner(stock(BASE))
    try:
        plain = runner.run(mixed())
        stopping = [
            replace(a, sampling={"stop": [plain.texts[a.request_id][30:36]]}) for a in mixed()[:4]
        ]
        return Reference(
            plain, runner.run(LONG), runner.run(SAMPLED), stopping, runner.run(stopping)
        )
    finally:
        runner.close()


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def runner(request: pytest.FixtureRequest, reference: Reference) -> Iterator[StepRunner]:
    runner = StepRunner(request.param)
    yield runner
    runner.close()


def num_groups(runner: StepRunner) -> int:
    return int(runner.scheduler.block_owner.geometry.num_groups)


def assert_pool_is_whole(runner: StepRunner) -> None:
    owner = runner.scheduler.block_owner
    assert owner.pool.get_num_free_blocks() == owner.pool.num_gpu_blocks - 1
    assert owner.host.num_used == 0


def test_fixed_placements_at_every_distance(runner: StepRunner, reference: Reference) -> None:
    groups = num_groups(runner)
    placements = {
        f"r{n}": frozenset[int]() if n % 5 == 4 else every(1 + n % 5, groups) for n in range(8)
    }

    outcome = runner.run(mixed(), hook=fixed(placements))

    assert first_difference(reference.mixed, outcome) == {}
    assert outcome.sums["num_loads"] > 0
    assert_pool_is_whole(runner)


def test_placements_that_change_at_any_step_in_both_directions(
    runner: StepRunner, reference: Reference
) -> None:
    kv = runner.case.kv
    assert kv is not None
    num_changes = num_layer_loads = num_reused = 0
    for seed in (1, 2):
        outcome = runner.run(mixed(), hook=churn(seed))
        assert first_difference(reference.mixed, outcome) == {}
        assert outcome.num_offloads > 10
        assert outcome.num_restores > 10
        num_changes += (outcome.num_offloads + outcome.num_restores) * kv.layers_per_group
        num_layer_loads += int(outcome.sums["num_loads"]) * kv.layers_per_group
        num_reused += outcome.num_reused_evictions

    assert num_changes >= 200  # layers of requests
    assert num_layer_loads >= 1_000
    assert num_reused >= 20
    assert_pool_is_whole(runner)


def test_a_prompt_larger_than_the_pool_is_answered(
    runner: StepRunner, reference: Reference
) -> None:
    outcome = runner.run(LONG)  # nobody chose a placement: the capacity guard does

    assert first_difference(reference.long, outcome) == {}
    assert outcome.num_preemptions == 0
    num_layers_resident = 31 * num_groups(runner)
    assert num_layers_resident > runner.case.num_blocks


def test_aborts_leave_the_others_exact_and_the_pool_whole(
    runner: StepRunner, reference: Reference
) -> None:
    aborted = {"r0": 12, "r2": 25, "r5": 33}
    workload = [replace(a, abort_at=aborted.get(a.request_id)) for a in mixed()]

    outcome = runner.run(workload, hook=churn(3))

    differing = first_difference(reference.mixed, outcome)
    assert not differing.keys() - aborted.keys()
    for request_id in aborted:  # what they got before their end was right
        got = outcome.tokens.get(request_id, [])
        assert got == reference.mixed.tokens[request_id][: len(got)]
    assert_pool_is_whole(runner)


def test_seeded_sampling_and_logprobs(runner: StepRunner, reference: Reference) -> None:
    if runner.case.max_num_batched_tokens < 2_048:
        pytest.skip("vLLM cannot rewind a seeded generator on CPU after a partial prefill")
    outcome = runner.run(SAMPLED, hook=churn(4))

    assert first_difference(reference.sampled, outcome) == {}
    for request_id, expected in reference.sampled.logprobs.items():
        # Another batch composition rounds differently in the last digits.
        assert outcome.logprobs[request_id] == pytest.approx(expected, abs=1e-3)


def test_stop_strings(runner: StepRunner, reference: Reference) -> None:
    outcome = runner.run(reference.stopping, hook=churn(5))

    assert outcome.texts == reference.stopped.texts
    assert first_difference(reference.stopped, outcome) == {}
    assert_pool_is_whole(runner)


@pytest.mark.parametrize("runner", [BASE], ids=["layers"], indirect=True)
@pytest.mark.parametrize(
    "fault",
    [faults.DropsCopies, faults.MistakesBlocks, faults.SkipsWaits, faults.SkipsSaveWaits],
)
def test_a_single_kind_of_mistake_is_noticed(
    runner: StepRunner, reference: Reference, fault: type[faults.FaultyEngine]
) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    transfers: Any = get_kv_transfer_group().runner
    faulty = fault(transfers.engine.engine)  # past the integrity guard
    everything = {f"r{n}": frozenset(range(8)) for n in range(8)}
    with faults.swapped(transfers, faulty):
        outcome = runner.run(mixed(), hook=fixed(everything, num_staging=1))
    faulty.end()

    assert faulty.num_faults > 0
    assert first_difference(reference.mixed, outcome) != {}
