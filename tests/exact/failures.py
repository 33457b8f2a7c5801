"""Copies fail, hang and change bytes under every kind of parallelism and scheduler.

A night runs it, and a commit the engine that it draws; `test_layerwise_failures.py` runs on each.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from lab.engine.conversations import conversations
from lab.engine.step_runner import StepRunner
from lab.engine.workloads import churn, mixed
from tests.exact.cached_prefixes import Hits
from tests.exact.cases import make_case
from tests.exact.evidence import assert_pool_is_whole
from tests.exact.failing_engine import FaultRates
from tests.exact.failure_cases import ALONE, CONVERSING, TOGETHER, assert_right, run_with_faults
from tests.exact.reference import answers_to, reference

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(1_800)]

CASES = {
    "synchronous": make_case(),
    "asynchronous-pairs": make_case(layers_per_group=2, asynchronous=True),
    "tensor-parallel": make_case(tensor_parallel_size=2),
    "pipeline-parallel": make_case(pipeline_parallel_size=2),
}
WORKLOAD = mixed(8)


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def runner(request: pytest.FixtureRequest) -> Iterator[StepRunner]:
    runner = StepRunner(request.param)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Stock vLLM's tokens."""
    return answers_to(WORKLOAD, reference("float32")["mixed"]).tokens


@pytest.mark.parametrize("kind", [*ALONE, "together"])
def test_tokens_are_exact_whatever_copies_do(
    runner: StepRunner, expected: dict[str, list[int]], kind: str
) -> None:
    rates: FaultRates = {**ALONE, "together": TOGETHER}[kind]

    run = run_with_faults(runner, rates, hook=churn(2), workload=WORKLOAD)

    assert_right(run, expected)
    assert sum(run.faults.values()) > 0
    assert_pool_is_whole(runner)


def test_conversations_are_exact_whatever_copies_do(
    runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference("float32")["conversations"].tokens
    hits = Hits(runner, monkeypatch)

    run = run_with_faults(
        runner, CONVERSING, hook=churn(4, share=0.2), workload=conversations(expected)
    )

    assert_right(run, expected)
    assert hits.num_blocks.keys() & run.lost
    assert_pool_is_whole(runner)


def test_class_6_rank_divergence_a_failure_on_the_last_rank_is_acted_on_by_all(
    runner: StepRunner, expected: dict[str, list[int]]
) -> None:
    if runner.case.num_ranks == 1:
        pytest.skip("one rank cannot differ")
    rates = replace(TOGETHER, ranks=frozenset({runner.case.num_ranks - 1}))

    run = run_with_faults(runner, rates, hook=churn(3), workload=WORKLOAD)

    assert_right(run, expected)
    assert run.lost
