"""KV that is computed anew in every step: tokens identical to stock vLLM.

One engine whose pool holds everything, and one with a scarce pool, whose requests have layers on
the host beside what is uncached; `tests/exact/product.py` runs the other ones.
"""

from collections.abc import Iterator

import pytest

from lab.step_runner import Outcome, StepRunner, first_difference
from lab.workloads import churn, holds, mixed, together, with_aborts
from tests.exact.evidence import assert_pool_is_whole
from tests.exact.failure_cases import TOGETHER, assert_right, run_with_faults
from tests.exact.reference import answers_to, reference
from tests.exact.uncached import (
    ROOMY_FRAC,
    assert_right_and_recomputed,
    at_random,
    deciding,
    half_of_everybody,
    uncached_case,
)

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

ROOMY = uncached_case(share=ROOMY_FRAC)
SCARCE = uncached_case(layers_per_group=2, asynchronous=True)


@pytest.fixture(scope="module")
def expected() -> Outcome:
    """What stock vLLM answers."""
    return reference("float32")["mixed"]


@pytest.fixture(scope="module", params=[ROOMY, SCARCE], ids=["roomy", "scarce-pairs-asynchronous"])
def runner(request: pytest.FixtureRequest) -> Iterator[StepRunner]:
    runner = StepRunner(request.param)
    yield runner
    runner.close()


def on(case: object, name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("runner", [case], ids=[name], indirect=True)


ROOMY_ONLY = on(ROOMY, "roomy")
SCARCE_ONLY = on(SCARCE, "scarce-pairs-asynchronous")


@ROOMY_ONLY
def test_half_of_everybodys_kv_is_computed_anew(runner: StepRunner, expected: Outcome) -> None:
    with deciding(runner, half_of_everybody) as found:
        outcome = runner.run(mixed(8))

    assert first_difference(answers_to(mixed(8), expected), outcome) == {}
    assert found.num_rows >= 300


@ROOMY_ONLY
def test_without_the_shadows_the_tokens_differ(
    runner: StepRunner, expected: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(runner.scheduler.shadows), "add_to", lambda self, output: [])
    with deciding(runner, half_of_everybody):
        outcome = runner.run(mixed(8))

    assert len(first_difference(answers_to(mixed(8), expected), outcome)) >= 4


def test_prefixes_that_grow_and_shrink_while_layers_move(
    runner: StepRunner, expected: Outcome
) -> None:
    with deciding(runner, at_random(1)) as found:
        outcome = runner.run(mixed(), hook=churn(1, share=0.2))

    assert_right_and_recomputed(runner, expected, outcome, mixed(), found)


def test_pauses_and_parks_and_aborts_of_requests_with_uncached_kv(
    runner: StepRunner, expected: Outcome
) -> None:
    workload = with_aborts(mixed(), seed=3)
    with deciding(runner, at_random(2)) as found:
        outcome = runner.run(workload, hook=together(churn(2, share=0.1), holds(2)))

    assert_right_and_recomputed(runner, expected, outcome, workload, found)


@SCARCE_ONLY
def test_copies_that_fail_beside_what_is_computed_anew(
    runner: StepRunner, expected: Outcome
) -> None:
    with deciding(runner, at_random(3)) as found:
        run = run_with_faults(runner, TOGETHER, hook=together(churn(3), holds(3)))

    assert_right(run, answers_to(mixed(8), expected).tokens)
    assert sum(run.faults.values()) > 0
    assert found.num_with_offloaded > 0
    assert_pool_is_whole(runner)
