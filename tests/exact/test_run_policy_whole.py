"""Who runs changes no token where layers cannot leave, either."""

import random
from collections.abc import Iterator

import pytest

from lab.engine.closed_loop import asking
from lab.engine.step_runner import EngineCase, Outcome, StepRunner
from lab.engine.workloads import mixed
from services.control.options import ControllerOptions
from tests.exact.reference import reference
from tests.exact.run_at_random import at_random

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

WHOLE_BLOCKS = 37  # of all layers: two thirds of what the workload takes


@pytest.fixture(scope="module")
def expected() -> Outcome:
    """What stock vLLM answers to `mixed`."""
    return reference("float32")["mixed"]


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "asynchronous"])
def whole(request: pytest.FixtureRequest) -> Iterator[StepRunner]:
    """Yield an engine without layer-wise KV, whose pool holds some of the requests only."""
    case = EngineCase(
        num_blocks=WHOLE_BLOCKS,
        controller=ControllerOptions(policy="evenflow"),
        asynchronous=request.param,
        prefix_caching=request.param,
    )
    runner = StepRunner(case)
    yield runner
    runner.close()


def test_random_decisions_without_layers_leave_the_tokens_exact(
    whole: StepRunner, expected: Outcome
) -> None:
    with asking(whole, "", run_policy=at_random(random.Random(2))) as loop:
        outcome = whole.run(mixed())

        assert outcome.tokens == expected.tokens
        assert loop.admission.num_decisions >= 100
        assert outcome.num_preemptions >= 5


def test_the_products_policy_without_layers_leaves_the_tokens_exact(
    whole: StepRunner, expected: Outcome
) -> None:
    """A policy that parks whom the batch has outgrown leaves vLLM nobody to preempt."""
    outcome = whole.run(mixed())

    assert outcome.tokens == expected.tokens
    assert sum(whole.scheduler.loop.counts.reasons.values()) >= len(mixed())
    assert whole.scheduler.loop.counts.reasons["outgrown"] >= 1
    assert outcome.num_preemptions >= 1
