"""Two ranks: what a commit sees of parallel engines, of which a night runs all."""

import pytest

from lab.engine.step_runner import StepRunner
from lab.engine.workloads import churn, holds, mixed, together, with_aborts
from tests.exact.cases import STANDING
from tests.exact.evidence import assert_exact
from tests.exact.reference import reference

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]


def test_pauses_and_parks_mixed_with_changes_and_aborts_on_two_ranks() -> None:
    workload = with_aborts(mixed(), seed=3)
    runner = StepRunner(STANDING["tensor-parallel-pairs"])
    try:
        outcome = runner.run(workload, hook=together(churn(6), holds(6)))

        assert_exact(runner, reference("float32")["mixed"], outcome, workload)
    finally:
        runner.close()
