"""Whatever is offloaded, moved or aborted: tokens identical to stock vLLM.

Five engines cover the options pairwise, beside stock vLLM's; `make test-exact` runs their product.
Pools hold 40 % of what full residency takes. Copies take their time before any byte appears, and
what is not yet there, or no longer owned, is NaN.
"""

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from services.executor.kv.cpu_copy_engine import LinkModel
from services.executor.kv.events import difference
from services.placement.resume import ResumeWay
from tests.exact import faults
from tests.exact.aborts import STATES, AbortsByState
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
    churn,
    every,
    fixed,
    holds,
    long_prompt,
    mixed,
    peak_blocks,
    together,
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
    for workload in (mixed(num_groups(case)), long_prompt(num_groups(case))):
        assert pool_share(case, workload) <= SCARCE_FRAC
    (longest,) = (a for a in long_prompt() if a.request_id == LONGEST)
    num_full_blocks = len(longest.prompt) // case.block_size
    assert num_full_blocks * num_groups(case) > case.num_blocks, "the prompt fits the pool"


def test_full_residency_is_counted_as_the_engine_counts_it(reference: Reference) -> None:
    assert peak_blocks(mixed(), block_size=LAYERS.block_size) == reference.mixed.peak_blocks
    assert peak_blocks(long_prompt(), block_size=LAYERS.block_size) == reference.long.peak_blocks


def test_fixed_placements_at_every_distance(runner: StepRunner, reference: Reference) -> None:
    groups = num_groups(runner.case)
    workload = mixed(groups)
    placements = {f"r{n}": every(1 + n % 5, groups) for n in range(len(workload)) if n % 5 != 4}

    outcome = runner.run(workload, hook=fixed(placements))

    assert_exact(runner, reference.mixed, outcome, workload)


def test_placements_that_change_at_any_step_in_both_directions(
    runner: StepRunner, reference: Reference
) -> None:
    workload = mixed(num_groups(runner.case))

    outcome = runner.run(workload, hook=churn(1))

    assert_exact(runner, reference.mixed, outcome, workload, min_changes=MIN_RANDOM_CHANGES)
    # After every step of a run the block formula is compared with the pool: so it was here with
    # one and two buffers, while copies were under way and when none was.
    formula = outcome.formula
    assert formula.num_compared > outcome.num_steps
    assert min(formula.num_settled, formula.num_in_transit) > 100
    assert max(formula.num_staging_seen) == runner.scheduler.kv_options.max_staging_buffers


def test_a_prompt_larger_than_the_pool_is_answered(
    runner: StepRunner, reference: Reference
) -> None:
    workload = long_prompt(num_groups(runner.case))

    outcome = runner.run(workload)  # nobody chose a placement: the capacity guard does

    assert_exact(runner, reference.long, outcome, workload)


def test_aborts_leave_the_others_exact_and_the_pool_whole(
    runner: StepRunner, reference: Reference
) -> None:
    workload = with_aborts(mixed(num_groups(runner.case)), seed=3)
    assert any(arrival.abort_at is not None for arrival in workload)

    outcome = runner.run(workload, hook=churn(3))

    assert_exact(runner, reference.mixed, outcome, workload)


def test_seeded_sampling_and_logprobs(runner: StepRunner, reference: Reference) -> None:
    workload = SAMPLED[: len(mixed(num_groups(runner.case)))]

    outcome = runner.run(workload, hook=churn(4))

    assert_exact(runner, reference.sampled, outcome, workload)
    assert len(outcome.logprobs) == len(workload) // 2
    for request_id, logprobs in outcome.logprobs.items():
        # Another batch composition rounds differently in the last digits.
        assert logprobs == pytest.approx(reference.sampled.logprobs[request_id], abs=1e-3)


def test_stop_strings(runner: StepRunner, reference: Reference) -> None:
    workload = reference.stopping[: len(mixed(num_groups(runner.case)))]

    outcome = runner.run(workload, hook=churn(5))

    assert outcome.texts.items() <= reference.stopped.texts.items()
    assert_exact(runner, reference.stopped, outcome, workload)


def test_pauses_and_parks_mixed_with_changes_and_aborts(
    runner: StepRunner, reference: Reference
) -> None:
    workload = with_aborts(mixed(), seed=3)
    before = runner.scheduler.transfers.count_events()

    outcome = runner.run(workload, hook=together(churn(6), holds(6)))

    assert_exact(runner, reference.mixed, outcome, workload)
    events = difference(runner.scheduler.transfers.count_events(), before)
    assert events["num_pauses"] >= 10
    assert events["num_parks"] >= 10


LAYERS_ONLY = pytest.mark.parametrize("runner", [LAYERS], ids=["layers"], indirect=True)


def assert_same_tokens(runner: StepRunner, expected: Outcome, outcome: Outcome) -> None:
    assert first_difference(expected, outcome) == {}
    assert_pool_is_whole(runner)


def assert_pool_is_whole(runner: StepRunner) -> None:
    owner = runner.scheduler.block_owner
    assert owner.pool.get_num_free_blocks() == owner.pool.num_gpu_blocks - 1
    assert owner.host.num_used == 0


@LAYERS_ONLY
@pytest.mark.parametrize("way", ResumeWay)
def test_thirty_resumes_of_each_way(
    runner: StepRunner, reference: Reference, monkeypatch: pytest.MonkeyPatch, way: ResumeWay
) -> None:
    control = runner.scheduler.control
    monkeypatch.setattr(control, "choose_way", lambda parked, engine: way)
    before = control.resumes.counts[way]

    outcome = runner.run(mixed(), hook=together(churn(7, share=0.1), holds(1, ("park",), 0.15)))

    assert_same_tokens(runner, reference.mixed, outcome)
    assert control.resumes.counts[way] - before >= 30


@LAYERS_ONLY
def test_aborts_of_paused_parked_and_loading_requests_leave_the_others_exact(
    runner: StepRunner, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.scheduler.control, "choose_way", lambda *_: ResumeWay.LOAD)
    counts: Counter[str] = Counter()
    for seed in range(10, 20):
        aborts = AbortsByState(runner, seed=seed)

        outcome = runner.run(mixed(), hook=together(churn(seed, share=0.1), holds(seed), aborts))

        counts += aborts.counts
        for request_id in aborts.aborted:
            got = outcome.tokens.pop(request_id, [])
            assert got == reference.mixed.tokens[request_id][: len(got)]
        others = reference.mixed.tokens.keys() - aborts.aborted
        assert outcome.tokens == {name: reference.mixed.tokens[name] for name in others}
        assert_pool_is_whole(runner)
        if all(counts[state] >= 3 for state in STATES):
            return
    raise AssertionError(f"too few aborts: {counts}")


@LAYERS_ONLY
def test_a_full_host_pool_costs_recomputes_and_no_token(
    runner: StepRunner, reference: Reference
) -> None:
    owner = runner.scheduler.block_owner
    assert owner.host.reserve("somebody else", owner.host.num_free - 200)
    num_dropped = owner.num_dropped_copies
    try:
        outcome = runner.run(mixed(), hook=together(churn(8, share=0.1), holds(8)))
    finally:
        owner.host.cancel_reservation("somebody else")

    assert_same_tokens(runner, reference.mixed, outcome)
    assert owner.num_dropped_copies > num_dropped


@LAYERS_ONLY
def test_without_a_budget_nothing_is_mirrored_and_offloaded_groups_still_are_copied(
    runner: StepRunner, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_through = runner.scheduler.transfers.write_through
    monkeypatch.setattr(write_through, "_budget", lambda num_under_way: 0)
    num_mirrored = write_through.num_mirrored_blocks

    outcome = runner.run(mixed(), hook=together(churn(9, share=0.1), holds(9)))

    assert_same_tokens(runner, reference.mixed, outcome)
    assert write_through.num_mirrored_blocks == num_mirrored
    assert outcome.num_offloads > 0


@LAYERS_ONLY
def test_a_parked_request_whose_copies_are_mixed_up_is_noticed(
    runner: StepRunner, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, control = runner.scheduler.block_owner, runner.scheduler.control
    park = owner.park

    def park_wrongly(request_id: str) -> Any:
        blocks = park(request_id)
        request = owner.requests.get(request_id)
        if request is not None:  # the order of one layer's blocks would not matter to attention
            one, other = request.groups[2], request.groups[3]
            one.host_slots, other.host_slots = other.host_slots, one.host_slots
        return blocks

    monkeypatch.setattr(owner, "park", park_wrongly)
    monkeypatch.setattr(control, "choose_way", lambda parked, engine: ResumeWay.LOAD)

    outcome = runner.run(mixed(), hook=holds(1, ("park",)))

    assert first_difference(reference.mixed, outcome) != {}


@LAYERS_ONLY
def test_half_the_link_speed_raises_the_stall_by_the_time_that_the_bytes_take(
    runner: StepRunner,
) -> None:
    # With one buffer a load starts when the layer before it has ended, and the next one waits. What
    # a layer computes meanwhile hides the same part of its load at either speed, and what a busy
    # machine adds is added to both: the difference is the bytes' alone.
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


@LAYERS_ONLY
@pytest.mark.parametrize(
    "fault",
    [faults.DropsCopies, faults.MistakesBlocks, faults.SkipsWaits, faults.SkipsSaveWaits],
)
def test_a_single_kind_of_mistake_is_noticed(
    runner: StepRunner, reference: Reference, fault: type[faults.FaultyEngine]
) -> None:
    everything = {f"r{n}": frozenset(range(8)) for n in range(8)}
    with faults.spoiling(fault) as faulty:
        outcome = runner.run(mixed(8), hook=fixed(everything, num_staging=1))

    assert faulty.num_faults > 0
    assert first_difference(reference.mixed, outcome).keys() & everything.keys()
