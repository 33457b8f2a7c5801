"""Whatever is offloaded, moved or aborted: tokens identical to stock vLLM.

Five engines cover the options pairwise, beside stock vLLM's; `make test-exact` runs their product.
Pools hold 40 % of what full residency takes. Copies take their time before any byte appears, and
what is not yet there, or no longer owned, is NaN.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from services.executor.kv.cpu_copy_engine import LinkModel
from tests.exact import faults
from tests.exact.cases import SCARCE_FRAC, SLOW_LINK, make_case, num_groups, pool_share
from tests.exact.evidence import MIN_RANDOM_CHANGES, assert_exact
from tests.exact.harness import (
    Arrival,
    EngineCase,
    Outcome,
    StepRunner,
    first_difference,
    make_prompt,
    stock,
)
from tests.exact.link import h2d_link
from tests.exact.workloads import (
    LONGEST,
    aborted_ids,
    churn,
    every,
    fixed,
    long_prompt,
    mixed,
    peak_blocks,
    with_aborts,
)

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

LAYERS = make_case()
CASES = {
    "layers": LAYERS,
    "pairs-of-layers-in-small-chunks": make_case(
        layers_per_group=2,
        buffers=1,
        options=replace(SLOW_LINK, host_memory="ring"),
        max_num_batched_tokens=97,
    ),
    "halves-asynchronous": make_case(
        layers_per_group=4,
        options=replace(SLOW_LINK, pin_bytes_per_s=256e6),  # host memory is ready after a second
        asynchronous=True,
    ),
    "tensor-parallel": make_case(buffers=1, tensor_parallel_size=2),
    "pipeline-parallel": make_case(pipeline_parallel_size=2),
}
ABORTED = with_aborts(mixed(), seed=3)
SAMPLED = [
    replace(arrival, sampling={"temperature": 1.0, "top_p": 0.9, "seed": 7, "logprobs": 2})
    if number % 2
    else arrival
    for number, arrival in enumerate(mixed())
]


@dataclass(frozen=True)
class Reference:
    """What stock vLLM answers."""

    mixed: Outcome
    long: Outcome
    sampled: Outcome
    stopping: list[Arrival]  # `mixed`, some of it ending at a string of its own answer
    stopped: Outcome


@pytest.fixture(scope="module")
def reference() -> Reference:
    runner = StepRunner(stock(LAYERS))
    try:
        plain = runner.run(mixed())
        stopping = [
            replace(a, sampling={"stop": [plain.texts[a.request_id][30:36]]}) if n % 4 == 1 else a
            for n, a in enumerate(mixed())
        ]
        return Reference(
            plain, runner.run(long_prompt()), runner.run(SAMPLED), stopping, runner.run(stopping)
        )
    finally:
        runner.close()


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def runner(request: pytest.FixtureRequest, reference: Reference) -> Iterator[StepRunner]:
    runner = StepRunner(request.param)
    yield runner
    runner.close()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_pool_is_scarce(case: EngineCase) -> None:
    for workload in (mixed(), long_prompt()):
        assert pool_share(case, workload) <= SCARCE_FRAC
    (longest,) = (a for a in long_prompt() if a.request_id == LONGEST)
    num_full_blocks = len(longest.prompt) // case.block_size
    assert num_full_blocks * num_groups(case) > case.num_blocks, "the prompt fits the pool"


def test_full_residency_is_counted_as_the_engine_counts_it(reference: Reference) -> None:
    assert peak_blocks(mixed(), block_size=LAYERS.block_size) == reference.mixed.peak_blocks
    assert peak_blocks(long_prompt(), block_size=LAYERS.block_size) == reference.long.peak_blocks


def test_fixed_placements_at_every_distance(runner: StepRunner, reference: Reference) -> None:
    groups = num_groups(runner.case)
    placements = {f"r{n}": every(1 + n % 5, groups) for n in range(len(mixed())) if n % 5 != 4}

    outcome = runner.run(mixed(), hook=fixed(placements))

    assert_exact(runner, reference.mixed, outcome)


def test_placements_that_change_at_any_step_in_both_directions(
    runner: StepRunner, reference: Reference
) -> None:
    outcome = runner.run(mixed(), hook=churn(1))

    assert_exact(runner, reference.mixed, outcome, min_changes=MIN_RANDOM_CHANGES)
    # After every step of a run the block formula is compared with the pool: so it was here with
    # one and two buffers, while copies were under way and when none was.
    formula = outcome.formula
    assert formula.num_compared > outcome.num_steps
    assert min(formula.num_settled, formula.num_in_transit) > 100
    assert max(formula.num_staging_seen) == runner.scheduler.kv_options.max_staging_buffers


def test_a_prompt_larger_than_the_pool_is_answered(
    runner: StepRunner, reference: Reference
) -> None:
    outcome = runner.run(long_prompt())  # nobody chose a placement: the capacity guard does

    assert_exact(runner, reference.long, outcome)


def test_aborts_leave_the_others_exact_and_the_pool_whole(
    runner: StepRunner, reference: Reference
) -> None:
    outcome = runner.run(ABORTED, hook=churn(3))

    assert_exact(runner, reference.mixed, outcome, aborted=aborted_ids(ABORTED))


def test_seeded_sampling_and_logprobs(runner: StepRunner, reference: Reference) -> None:
    if runner.case.max_num_batched_tokens < 2_048:
        pytest.skip("vLLM cannot rewind a seeded generator on CPU after a partial prefill")
    outcome = runner.run(SAMPLED, hook=churn(4))

    assert_exact(runner, reference.sampled, outcome)
    for request_id, expected in reference.sampled.logprobs.items():
        # Another batch composition rounds differently in the last digits.
        assert outcome.logprobs[request_id] == pytest.approx(expected, abs=1e-3)


def test_stop_strings(runner: StepRunner, reference: Reference) -> None:
    outcome = runner.run(reference.stopping, hook=churn(5))

    assert outcome.texts == reference.stopped.texts
    assert_exact(runner, reference.stopped, outcome)


@pytest.mark.parametrize("runner", [LAYERS], ids=["layers"], indirect=True)
def test_half_the_link_speed_raises_the_stall_by_the_time_that_the_bytes_take(
    runner: StepRunner,
) -> None:
    """With one buffer a load starts when the layer before it has ended, and the next one waits.

    What a layer computes meanwhile hides the same part of its load at either speed, and so does
    what a busy machine adds: the difference is the bytes' alone.
    """
    bytes_per_s = 1e7  # a load takes 33 ms, what it hides behind about 1
    workload = [
        Arrival(request_id="s", prompt=make_prompt(645, seed=1), num_output_tokens=8),
    ]
    everything = fixed({"s": frozenset(range(8))}, num_staging=1)

    def sums_at(speed: float) -> dict[str, float]:
        with h2d_link(LinkModel(bytes_per_s=speed)):
            return runner.run(workload, hook=everything).sums

    pairs = [(sums_at(bytes_per_s), sums_at(bytes_per_s / 2)) for _ in range(3)]
    raises_s = [half["stall_s"] - full["stall_s"] for full, half in pairs]

    # 7 steps that decode, 8 layers, 20 full blocks of 32 tokens, 2 heads of 32 floats, K and V.
    num_bytes = 7 * 8 * 20 * 32 * 2 * 32 * 4 * 2
    assert {sums["h2d_bytes"] for pair in pairs for sums in pair} == {num_bytes}
    predicted_s = num_bytes / (bytes_per_s / 2) - num_bytes / bytes_per_s
    assert statistics.median(raises_s) == pytest.approx(predicted_s, rel=0.15)


@pytest.mark.parametrize("runner", [LAYERS], ids=["layers"], indirect=True)
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
        outcome = runner.run(mixed()[:8], hook=fixed(everything, num_staging=1))
    faulty.end()

    assert faulty.num_faults > 0
    assert first_difference(reference.mixed, outcome).keys() & everything.keys()
