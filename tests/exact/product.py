"""The full product of the options: a night runs all of it, a commit what it draws (`--draw`).

One engine per combination, each with the same runs; every run asserts by itself that it moved
enough (`evidence.py`). And bf16 against stock vLLM on the same step schedule.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from lab.engine.conversations import conversations
from lab.engine.step_runner import (
    Arrival,
    EngineCase,
    Hook,
    StepRunner,
    first_difference,
)
from lab.engine.workloads import (
    alternating,
    at_distances,
    churn,
    distances_of,
    first_distances,
    holds,
    long_prompt,
    mixed,
    together,
    with_aborts,
)
from tests.exact.cached_prefixes import converse_in_all_ways, converse_with_little_room
from tests.exact.cases import SCARCE_FRAC, make_case, num_groups, pool_share
from tests.exact.evidence import MIN_RANDOM_CHANGES, assert_exact, assert_pressure
from tests.exact.failure_cases import TOGETHER, assert_right, run_with_faults
from tests.exact.reference import answers_to, reference
from tests.exact.shared_prefixes import MIN_EARLY, share_in_all_ways
from tests.exact.uncached import (
    ROOMY_FRAC,
    assert_right_and_recomputed,
    at_random,
    deciding,
    run_interrupted,
    uncached_case,
)

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(1_800)]

LAYERS_PER_GROUP = (1, 2, 4)
STAGING_BUFFERS = (1, 2)
SCHEDULERS = (False, True)  # asynchronous
NUM_BF16_RUNS = 2  # per engine
MIN_SPLITS = {"all": 100, "offloaded": 20, "loading": 1}  # of holders of blocks, per engine
MIN_OUTLIVED = 20  # trunks, by their first user


def single_rank_cases() -> dict[str, EngineCase]:
    """Return every combination of the options; half of them in steps that end within a block."""
    cases = {}
    for layers, buffers, asynchronous in itertools.product(
        LAYERS_PER_GROUP, STAGING_BUFFERS, SCHEDULERS
    ):
        chunk = 97 if (LAYERS_PER_GROUP.index(layers) + buffers + asynchronous) % 2 else 2_048
        name = f"{layers}-layers-{buffers}-buffers-chunk-{chunk}{'-async' * asynchronous}"
        cases[name] = make_case(
            layers_per_group=layers,
            buffers=buffers,
            asynchronous=asynchronous,
            max_num_batched_tokens=chunk,
        )
    return cases


def parallel_cases() -> dict[str, EngineCase]:
    cases = {}
    for (tensor, pipeline), layers, buffers in itertools.product(
        ((2, 1), (1, 2)), (1, 2), STAGING_BUFFERS
    ):
        cases[f"tp{tensor}-pp{pipeline}-{layers}-layers-{buffers}-buffers"] = make_case(
            layers_per_group=layers,
            buffers=buffers,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
        )
    return cases


def uncached_cases() -> dict[str, EngineCase]:
    """Return engines that compute KV anew: with room for all of it, and with layers on the host."""
    cases = {}
    for layers, asynchronous in itertools.product(LAYERS_PER_GROUP, SCHEDULERS):
        name = f"uncached-{layers}-layers-{'scarce-async' if asynchronous else 'roomy'}"
        cases[name] = uncached_case(
            layers_per_group=layers,
            asynchronous=asynchronous,
            share=SCARCE_FRAC if asynchronous else ROOMY_FRAC,
        )
    cases["uncached-chunk-97"] = uncached_case(buffers=1, max_num_batched_tokens=97)
    cases["uncached-tp2-pp1-pairs"] = uncached_case(layers_per_group=2, tensor_parallel_size=2)
    cases["uncached-tp1-pp2"] = uncached_case(pipeline_parallel_size=2)
    return cases


CASES = {**single_rank_cases(), **parallel_cases()}
UNCACHED_CASES = uncached_cases()
BF16_CASES = {
    f"{layers}-layers": make_case(layers_per_group=layers, share=ROOMY_FRAC, dtype="bfloat16")
    for layers in LAYERS_PER_GROUP
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One workload through one engine, and what moves KV meanwhile."""

    name: str
    workload: Sequence[Arrival]
    hook: Hook | None
    reference: str = "mixed"
    min_changes: int = 2


def distances(num_groups: int) -> list[Run]:
    """Between them every distance is somebody's."""
    workload = mixed(num_groups)
    return [
        Run(
            name=f"distances from {first}",
            workload=workload,
            hook=at_distances(workload, num_groups, first=first),
        )
        for first in first_distances(num_groups)
    ]


def changes(num_groups: int) -> list[Run]:
    return [
        Run(
            name=f"changes, seed {seed}",
            workload=mixed(num_groups),
            hook=churn(seed),
            min_changes=MIN_RANDOM_CHANGES,
        )
        for seed in (1, 2)
    ]


def aborts(num_groups: int) -> list[Run]:
    return [
        Run(
            name=f"aborts, seed {seed}",
            workload=with_aborts(mixed(num_groups), seed=seed),
            hook=churn(seed),
        )
        for seed in (3, 4)
    ]


def long_prompts(num_groups: int) -> list[Run]:
    return [
        Run(name="long", workload=long_prompt(num_groups), hook=None, reference="long"),
        Run(
            name="long, changes",
            workload=long_prompt(num_groups),
            hook=churn(5),
            reference="long",
            min_changes=MIN_RANDOM_CHANGES,
        ),
    ]


def pauses_and_parks(num_groups: int) -> list[Run]:
    return [
        Run(
            name=f"pauses and parks, seed {seed}",
            workload=with_aborts(mixed(), seed=seed),
            hook=together(churn(seed), holds(seed)),
        )
        for seed in (7, 8)
    ]


KINDS: tuple[Callable[[int], list[Run]], ...] = (
    distances,
    changes,
    aborts,
    long_prompts,
    pauses_and_parks,
)


def test_pools_of_most_runs_are_scarce() -> None:
    shares = [
        pool_share(case, run.workload)
        for case in CASES.values()
        for kind in KINDS
        for run in kind(num_groups(case))
    ]
    shares += [pool_share(case, mixed()) for case in BF16_CASES.values()] * NUM_BF16_RUNS
    num_scarce = sum(share <= SCARCE_FRAC for share in shares)

    assert 2 * num_scarce >= len(shares)


@pytest.mark.parametrize("groups", sorted({num_groups(case) for case in CASES.values()}))
def test_every_distance_is_somebodys(groups: int) -> None:
    workload = mixed(groups)
    found = [
        distances_of(workload, groups, first=first).values() for first in first_distances(groups)
    ]

    assert set().union(*found) == set(range(1, groups + 1))


@pytest.mark.parametrize("case", BF16_CASES.values(), ids=BF16_CASES.keys())
def test_bf16_on_the_same_step_schedule(case: EngineCase) -> None:
    expected = reference("bfloat16")["mixed"]
    runner = StepRunner(case)
    hooks = (alternating((1, 2), num_groups(case)), churn(6))
    assert len(hooks) == NUM_BF16_RUNS
    try:
        for hook in hooks:
            outcome = runner.run(mixed(), hook=hook)
            assert outcome.num_steps == expected.num_steps, "not the same schedule"
            assert first_difference(expected, outcome) == {}
            assert_pressure(runner, outcome, min_changes=2)
    finally:
        runner.close()


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def runner(request: pytest.FixtureRequest) -> Iterator[StepRunner]:
    runner = StepRunner(request.param)
    yield runner
    runner.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_stock_vllm(
    runner: StepRunner, kind: Callable[[int], list[Run]]
) -> None:
    expected = reference("float32")
    for run in kind(num_groups(runner.case)):
        outcome = runner.run(run.workload, hook=run.hook)
        try:
            assert_exact(
                runner,
                expected[run.reference],
                outcome,
                run.workload,
                min_changes=run.min_changes,
            )
        except AssertionError as error:
            error.add_note(run.name)
            raise


def test_turns_begin_with_what_earlier_ones_left(
    runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference("float32")["conversations"]
    turns = conversations(expected.tokens)

    converse_with_little_room(runner, expected, turns)
    converse_in_all_ways(runner, expected, turns, monkeypatch)


def test_agents_share_prefixes(runner: StepRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference("float32")["agents"]
    is_staged = runner.case.pipeline_parallel_size > 1

    share_in_all_ways(
        runner,
        expected,
        monkeypatch,
        min_splits=MIN_SPLITS,
        min_outlived=MIN_OUTLIVED,
        # With two groups a stage nearly all have layers on the host, and share nothing early.
        min_early=0 if is_staged and num_groups(runner.case) <= 2 else MIN_EARLY,
    )


# The same fixture: a process has one engine at a time.
uncached_engines = pytest.mark.parametrize(
    "runner", UNCACHED_CASES.values(), ids=UNCACHED_CASES.keys(), indirect=True
)


@uncached_engines
@pytest.mark.parametrize("seed", [1, 2])
def test_kv_that_is_computed_anew_leaves_the_tokens_exact(runner: StepRunner, seed: int) -> None:
    workload = with_aborts(mixed(), seed=seed + 2)
    hook = together(churn(seed, share=0.2), holds(seed, begin=0.05))

    run = run_interrupted(runner, workload, hook, seed=seed)

    assert_right_and_recomputed(runner, reference("float32")["mixed"], *run)


@uncached_engines
def test_copies_that_fail_beside_what_is_computed_anew(runner: StepRunner) -> None:
    with deciding(runner, at_random(3)) as found:
        run = run_with_faults(runner, TOGETHER, hook=churn(3, share=0.2))

    assert_right(run, answers_to(mixed(8), reference("float32")["mixed"]).tokens)
    assert sum(run.faults.values()) > 0
    assert found.num_rows > 0
