"""The full product of the options: what `make test-exact` runs.

One engine per combination; the same workloads and the same assertions as the pairwise cover in
`tests/integration/test_layerwise_exact.py`, more seeds, and bf16 against stock on the same step
schedule.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from services.executor.kv.options import KVOptions
from tests.exact.harness import (
    Arrival,
    EngineCase,
    Outcome,
    StepRunner,
    first_difference,
    make_prompt,
    stock,
)
from tests.exact.workloads import churn, every, fixed, holds, mixed, together

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(1_800)]

NUM_LAYERS = 8
FULL_RESIDENCY_BLOCKS = 424  # of one layer each, all requests of `mixed` at their peak
LINK = KVOptions(
    host_bytes=256 << 20,
    copy_latency_s=0.5e-3,
    h2d_bytes_per_s=1e9,
    d2h_bytes_per_s=1e8,
    restore_when_free_frac=0.02,
    poison=True,
)
LONG = [Arrival(request_id="long", prompt=make_prompt(970, seed=41), num_output_tokens=24)]

LAYERS_PER_GROUP = (1, 2, 4)
STAGING_BUFFERS = (1, 2)
CHUNKS = (2_048, 97)  # tokens in one step; 97 ends within a block
SCHEDULERS = (False, True)  # asynchronous
PARALLELISM = ((2, 1), (1, 2))  # tensor, pipeline


def pool_blocks(layers_per_group: int, *, share: float) -> int:
    """Return a share of full residency, in blocks of a group; at least what the longest needs."""
    least = NUM_LAYERS // layers_per_group + 33  # one request of 1024 tokens, all offloaded
    return max(least, int(share * FULL_RESIDENCY_BLOCKS / layers_per_group)) + 1


def single_rank_cases() -> dict[str, EngineCase]:
    cases = {}
    for layers, buffers, chunk, asynchronous in itertools.product(
        LAYERS_PER_GROUP, STAGING_BUFFERS, CHUNKS, SCHEDULERS
    ):
        name = f"{layers}-layers-{buffers}-buffers-chunk-{chunk}{'-async' * asynchronous}"
        cases[name] = EngineCase(
            num_blocks=pool_blocks(layers, share=0.39),
            kv=replace(LINK, layers_per_group=layers, max_staging_buffers=buffers),
            max_num_batched_tokens=chunk,
            asynchronous=asynchronous,
        )
    return cases


def parallel_cases() -> dict[str, EngineCase]:
    cases = {}
    for (tensor, pipeline), layers, buffers in itertools.product(
        PARALLELISM, (1, 2), STAGING_BUFFERS
    ):
        # A block id is spent on every stage, so that stages share the count of blocks.
        groups_of_stage = layers * pipeline
        cases[f"tp{tensor}-pp{pipeline}-{layers}-layers-{buffers}-buffers"] = EngineCase(
            num_blocks=pool_blocks(groups_of_stage, share=0.39),
            kv=replace(LINK, layers_per_group=layers, max_staging_buffers=buffers),
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
        )
    return cases


CASES = {**single_rank_cases(), **parallel_cases()}


# First, for there is one engine per process: those of the fixtures below stay open.
@pytest.mark.parametrize("layers_per_group", LAYERS_PER_GROUP)
def test_bf16_on_the_same_step_schedule(layers_per_group: int) -> None:
    case = EngineCase(
        num_blocks=pool_blocks(layers_per_group, share=1.0),  # no step waits for a copy
        kv=replace(LINK, layers_per_group=layers_per_group),
        dtype="bfloat16",
    )
    expected_runner = StepRunner(stock(case))
    expected = expected_runner.run(mixed())
    expected_runner.close()
    groups = NUM_LAYERS // layers_per_group
    runner = StepRunner(case)
    try:
        outcome = runner.run(mixed(), hook=fixed({f"r{n}": every(2, groups) for n in range(8)}))
    finally:
        runner.close()

    assert outcome.num_steps == expected.num_steps, "not the same schedule"
    assert first_difference(expected, outcome) == {}


@pytest.fixture(scope="module")
def reference() -> tuple[Outcome, Outcome]:
    runner = StepRunner(stock(EngineCase(num_blocks=1)))
    try:
        return runner.run(mixed()), runner.run(LONG)
    finally:
        runner.close()


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def runner(
    request: pytest.FixtureRequest, reference: tuple[Outcome, Outcome]
) -> Iterator[StepRunner]:
    runner = StepRunner(request.param)
    yield runner
    runner.close()


@pytest.mark.parametrize("distance", [1, 2, 3, 4])
def test_every_distance(
    runner: StepRunner, reference: tuple[Outcome, Outcome], distance: int
) -> None:
    groups = runner.scheduler.block_owner.geometry.num_groups
    placements = {f"r{n}": every(distance, groups) for n in range(8)}

    outcome = runner.run(mixed(), hook=fixed(placements))

    assert first_difference(reference[0], outcome) == {}


def test_random_changes_and_aborts(runner: StepRunner, reference: tuple[Outcome, Outcome]) -> None:
    kv = runner.case.kv
    assert kv is not None
    num_loads = num_changes = num_reused = 0
    for seed in range(4):
        aborted = {f"r{(seed + n) % 8}": 10 + 9 * n for n in range(seed)}
        workload = [replace(a, abort_at=aborted.get(a.request_id)) for a in mixed()]
        outcome = runner.run(workload, hook=churn(seed))
        assert not first_difference(reference[0], outcome).keys() - aborted.keys()
        num_loads += int(outcome.sums["num_loads"]) * kv.layers_per_group
        num_changes += (outcome.num_offloads + outcome.num_restores) * kv.layers_per_group
        num_reused += outcome.num_reused_evictions

    assert num_loads >= 1_000
    assert num_changes >= 200
    assert num_reused >= 20
    owner = runner.scheduler.block_owner
    assert owner.pool.get_num_free_blocks() == owner.pool.num_gpu_blocks - 1


def test_random_pauses_and_parks(runner: StepRunner, reference: tuple[Outcome, Outcome]) -> None:
    counts = runner.scheduler.control.resumes.counts
    num_before = counts.total()
    for seed in range(2):
        aborted = {f"r{(seed + n) % 8}": 10 + 9 * n for n in range(1 + seed)}
        workload = [replace(a, abort_at=aborted.get(a.request_id)) for a in mixed()]
        outcome = runner.run(workload, hook=together(churn(seed, share=0.2), holds(seed)))
        assert not first_difference(reference[0], outcome).keys() - aborted.keys()

    assert counts.total() - num_before >= 10
    owner = runner.scheduler.block_owner
    assert owner.pool.get_num_free_blocks() == owner.pool.num_gpu_blocks - 1
    assert owner.host.num_used == 0


def test_a_prompt_larger_than_the_pool(
    runner: StepRunner, reference: tuple[Outcome, Outcome]
) -> None:
    assert first_difference(reference[1], runner.run(LONG)) == {}
