"""KV that is computed anew in every step: tokens identical to stock vLLM.

One engine whose pool holds everything, and one with a scarce pool, whose requests have layers on
the host beside what is uncached; `tests/exact/product.py` runs the other ones.
"""

from collections.abc import Iterator

import pytest

from lab.engine.step_runner import Outcome, StepRunner, first_difference
from lab.engine.workloads import (
    churn,
    every,
    fixed,
    holds,
    mixed,
    sampled,
    together,
    with_aborts,
)
from services.placement.run.papers.ellm import EllmRules
from tests.exact.cases import num_groups
from tests.exact.evidence import assert_pool_is_whole, assert_tokens
from tests.exact.failure_cases import TOGETHER, assert_right, run_with_faults
from tests.exact.reference import answers_to, reference
from tests.exact.uncached import (
    MIN_ROWS,
    MIN_ROWS_WITH_OFFLOADED,
    STANDING,
    assert_right_and_recomputed,
    at_random,
    deciding,
    half_of_everybody,
    run_interrupted,
)

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def expected() -> Outcome:
    """What stock vLLM answers."""
    return reference("float32")["mixed"]


@pytest.fixture(scope="module", params=STANDING.values(), ids=STANDING.keys())
def runner(request: pytest.FixtureRequest) -> Iterator[StepRunner]:
    runner = StepRunner(request.param)
    yield runner
    runner.close()


def on(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("runner", [STANDING[name]], ids=[name], indirect=True)


ROOMY_ONLY = on("roomy-pairs")
SCARCE_ONLY = on("scarce-asynchronous")


@ROOMY_ONLY
def test_half_of_everybodys_kv_is_computed_anew(runner: StepRunner, expected: Outcome) -> None:
    with deciding(runner, half_of_everybody) as found:
        outcome = runner.run(mixed(8))

    assert first_difference(answers_to(mixed(8), expected), outcome) == {}
    assert found.num_rows >= 2 * MIN_ROWS


@ROOMY_ONLY
def test_without_the_shadows_the_tokens_differ(
    runner: StepRunner, expected: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(runner.scheduler.shadows), "add_to", lambda self, output: [])
    with deciding(runner, half_of_everybody):
        outcome = runner.run(mixed(8))

    assert len(first_difference(answers_to(mixed(8), expected), outcome)) >= 4


def test_prefixes_that_grow_and_shrink_while_layers_move_and_requests_pause_park_and_end(
    runner: StepRunner, expected: Outcome
) -> None:
    workload = with_aborts(mixed(8), seed=5)
    hook = together(churn(1, share=0.2), holds(1, begin=0.05))

    run = run_interrupted(runner, workload, hook, seed=1)

    assert any(arrival.abort_at is not None for arrival in workload)
    assert_right_and_recomputed(runner, expected, *run)


@ROOMY_ONLY
def test_the_products_policy_at_a_given_ratio_with_seeded_sampling_and_logprobs(
    runner: StepRunner,
) -> None:
    workload, expected = sampled()[:8], reference("float32")["sampled"]

    with deciding(runner, rules=EllmRules(uncached_frac=0.4)) as found:
        outcome = runner.run(workload)

    assert_tokens(expected, outcome, workload)
    assert found.num_rows >= MIN_ROWS
    assert len(outcome.logprobs) == 4
    for request_id, logprobs in outcome.logprobs.items():
        # Another batch composition rounds differently in the last digits.
        assert logprobs == pytest.approx(expected.logprobs[request_id], abs=1e-3)


@SCARCE_ONLY
def test_without_the_shadows_the_tokens_of_requests_with_layers_on_the_host_differ(
    runner: StepRunner, expected: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = every(2, num_groups(runner.case))
    hook = fixed({arrival.request_id: away for arrival in mixed(8)})

    with deciding(runner, half_of_everybody) as found:
        outcome = runner.run(mixed(8), hook=hook)
    assert_tokens(expected, outcome, mixed(8))
    assert found.with_offloaded.total() >= MIN_ROWS_WITH_OFFLOADED

    monkeypatch.setattr(type(runner.scheduler.shadows), "add_to", lambda self, output: [])
    with deciding(runner, half_of_everybody) as found:
        outcome = runner.run(mixed(8), hook=hook)
    differing = first_difference(answers_to(mixed(8), expected), outcome)
    assert len(differing.keys() & +found.with_offloaded) >= 4


@SCARCE_ONLY
def test_the_products_policy_at_its_best_ratio(runner: StepRunner, expected: Outcome) -> None:
    with deciding(runner):
        outcome = runner.run(mixed(8))

    assert_tokens(expected, outcome, mixed(8))


@SCARCE_ONLY
def test_copies_that_fail_beside_what_is_computed_anew(
    runner: StepRunner, expected: Outcome
) -> None:
    with deciding(runner, at_random(3)) as found:
        run = run_with_faults(runner, TOGETHER, hook=together(churn(3), holds(3, begin=0.05)))

    assert_right(run, answers_to(mixed(8), expected).tokens)
    assert sum(run.faults.values()) > 0
    assert found.with_offloaded.total() > 0
    assert_pool_is_whole(runner)
