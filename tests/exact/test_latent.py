"""MLA's latents leave the pool and come back: tokens are stock vLLM's, on stock vLLM's steps."""

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import pytest
import torch

from lab.engine.orders import park
from lab.engine.step_runner import Arrival, Hook, Outcome, StepRunner, first_difference
from lab.engine.workloads import churn, fixed, holds, mixed
from lab.latent_model import NUM_LAYERS
from services.executor.copies.copy_engine import Direction
from services.executor.copies.copy_watch import CopyWatch, WatchedCopy
from tests.exact import faults
from tests.exact.evidence import MIN_RANDOM_CHANGES, assert_exact, assert_pool_is_whole
from tests.exact.latent_cases import aborted, alone, latent_case
from tests.exact.reference import reference

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

EVERYTHING = {f"r{n}": frozenset(range(NUM_LAYERS)) for n in range(len(mixed()))}
HAS_TILES = torch.cpu._is_amx_tile_supported()

CASES = [
    pytest.param(("latent-float32", latent_case()), id="reference"),
    pytest.param(
        ("latent-tensor-parallel", latent_case(num_ranks=2)),
        id="reference-tensor-parallel",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        ("latent-bfloat16", latent_case("AMX_MLA")),
        id="amx",
        marks=[
            pytest.mark.nightly,
            pytest.mark.skipif(not HAS_TILES, reason="vLLM's kernels for it take AMX"),
        ],
    ),
]


class Engine:
    """An engine, and what stock vLLM answers."""

    def __init__(self, name: str, runner: StepRunner) -> None:
        self.name, self.runner = name, runner

    @property
    def computes_prompts_whole(self) -> bool:
        return self.runner.case.attention_backend == "CPU_MLA"

    def expected(self, workload: str) -> Outcome:
        return reference(self.name)[workload]


@pytest.fixture(scope="module", params=CASES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    name, case = request.param
    reference(name)
    runner = StepRunner(case)
    yield Engine(name, runner)
    runner.close()


NUM_TRIES, NUM_PATIENT_TRIES = 3, 3


def run_on_the_same_steps(
    engine: Engine, name: str, workload: Sequence[Arrival], hooks: Iterable[Hook | None]
) -> tuple[Outcome, Outcome]:
    """Return what stock vLLM and a run gave that computed the same tokens together, step by step.

    A request may wait a step for copies, as the machine is busy: such a run says nothing. The last
    runs wait for them themselves.
    """
    expected = engine.expected(name)
    for number, hook in enumerate(itertools.islice(hooks, NUM_TRIES + NUM_PATIENT_TRIES)):
        with copies_awaited() if number >= NUM_TRIES else nullcontext():
            outcome = engine.runner.run(workload, hook=hook)
        if outcome.batches == expected.batches:
            return expected, outcome
    raise AssertionError("no run had stock vLLM's steps")


@contextmanager
def copies_awaited() -> Iterator[None]:
    """Let each step end with its copies, in this process, however busy the machine is."""
    poll = CopyWatch.poll

    def wait(watch: CopyWatch, watched: WatchedCopy) -> bool:
        while not poll(watch, watched):
            if watched.copy.direction is not Direction.D2H:
                return False
            time.sleep(1e-4)
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CopyWatch, "poll", wait)
        yield


def test_with_a_pool_of_half_of_the_latents_the_tokens_are_exact(engine: Engine) -> None:
    workload = mixed()
    guards = itertools.repeat(None)  # the capacity guard says what leaves

    expected, outcome = run_on_the_same_steps(engine, "mixed", workload, guards)

    assert_exact(engine.runner, expected, outcome, workload)


def test_placements_that_change_at_any_step_leave_the_tokens_exact(engine: Engine) -> None:
    workload = mixed()
    hooks = map(churn, itertools.count(1))

    expected, outcome = run_on_the_same_steps(engine, "mixed", workload, hooks)

    assert_exact(engine.runner, expected, outcome, workload, min_changes=MIN_RANDOM_CHANGES)


def test_aborts_leave_the_others_exact_and_the_pool_whole(engine: Engine) -> None:
    hooks = map(churn, itertools.count(3))

    expected, outcome = run_on_the_same_steps(engine, "aborts", aborted(), hooks)

    assert_exact(engine.runner, expected, outcome, aborted())


def test_a_prompt_larger_than_the_pool_is_answered(engine: Engine) -> None:
    case, (request,) = engine.runner.case, alone()
    assert len(request.prompt) // case.block_size * NUM_LAYERS >= case.num_blocks - 1

    expected, outcome = run_on_the_same_steps(engine, "alone", [request], itertools.repeat(None))

    assert first_difference(expected, outcome) == {}
    assert outcome.sums["num_loads"] >= 100
    assert_pool_is_whole(engine.runner)


def test_loads_that_copy_nothing_are_noticed(engine: Engine) -> None:
    if engine.runner.case.num_ranks > 1:
        pytest.skip("the ranks are other processes")
    hooks = itertools.repeat(fixed(EVERYTHING, num_staging=1))
    expected, outcome = run_on_the_same_steps(engine, "mixed", mixed(), hooks)
    assert first_difference(expected, outcome) == {}

    with faults.spoiling(faults.DropsCopies) as faulty:
        expected, outcome = run_on_the_same_steps(engine, "mixed", mixed(), hooks)

    assert faulty.num_faults > 0
    assert len(first_difference(expected, outcome)) > len(mixed()) // 2


def test_where_prompts_are_computed_whole_nobody_begins_behind_kv_that_is_there(
    engine: Engine,
) -> None:
    """Parked requests are computed from their first token on, and none begins with others' KV."""
    if not engine.computes_prompts_whole:
        pytest.skip("the backend computes the rest of a prompt behind KV that is there")
    counters = engine.runner.scheduler.block_owner.counters
    before, begun = counters.copy(), []
    admitted = engine.runner.scheduler.control.admitted

    def admit(requests: object, num_scheduled: dict[str, int]) -> None:
        requests = list(requests)  # type: ignore[call-overload]
        begun.extend(r.num_computed_tokens - num_scheduled[r.request_id] for r in requests)
        admitted(requests, num_scheduled)

    engine.runner.scheduler.control.admitted = admit
    try:
        outcome = engine.runner.run(mixed(), hook=holds(1, (park,)))
    finally:
        del engine.runner.scheduler.control.admitted

    assert counters.num_parks - before.num_parks >= 20
    assert len(begun) >= len(mixed()) + 20
    assert set(begun) == {0}
    assert not engine.runner.scheduler.kv_options.prefix_caching
    assert {len(tokens) for tokens in outcome.tokens.values()} == {
        arrival.num_output_tokens for arrival in mixed()
    }
    assert_pool_is_whole(engine.runner)
