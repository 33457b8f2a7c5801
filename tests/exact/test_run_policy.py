"""Who runs changes no token: random decisions, and the product's own policy, on a real engine."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from lab.engine.closed_loop import asking
from lab.engine.step_runner import EngineCase, Outcome, StepRunner
from lab.engine.workloads import mixed
from lab.stack.planner_process import warm_planner
from services.control.options import ControllerOptions
from services.executor.request_tag import to_extra_args
from services.pacing.types import ServiceLevel
from services.placement.presets import Run
from services.placement.run.types import RunDecision, RunSnapshot
from tests.exact.cases import make_case
from tests.exact.reference import reference

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def expected() -> Outcome:
    """What stock vLLM answers to `mixed`."""
    return reference("float32")["mixed"]


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "asynchronous"])
def runner(request: pytest.FixtureRequest) -> Iterator[StepRunner]:
    controller = ControllerOptions(plan_timeout_s=30.0, seed=7)
    runner = StepRunner(make_case(controller=controller, asynchronous=request.param))
    runner.run([replace(mixed()[0], num_output_tokens=2)])  # brings the calibration
    yield runner
    runner.close()


PARKS_EVERY = 8  # decisions
WHOLE_BLOCKS = 37  # of all layers: two thirds of what the workload takes


def at_random(rng: random.Random) -> Run:
    """Return a policy that parks, admits, orders and cuts prompts as it likes, in every step."""
    decisions = count(1)

    def decide(snapshot: RunSnapshot) -> RunDecision:
        running = [r.request_id for r in snapshot.requests if r.runs]
        parks = bool(running) and next(decisions) % PARKS_EVERY == 0
        park = {rng.choice(running)} if parks else set()
        run = [r.request_id for r in snapshot.requests if r.request_id not in park]
        rng.shuffle(run)
        return RunDecision(
            run=tuple([request_id for request_id in run if rng.random() < 0.9] or run),
            park=frozenset(park),
            chunk_tokens=rng.choice([None, 7, rng.randint(1, 512)]),
            offloads=rng.random() < 0.5,
        )

    return decide


def test_random_decisions_leave_the_tokens_exact(runner: StepRunner, expected: Outcome) -> None:
    scheduler = runner.scheduler
    with asking(runner, "", run_policy=at_random(random.Random(1))) as loop:
        num_parks = scheduler.block_owner.counters.num_parks
        outcome = runner.run(mixed())

        assert outcome.tokens == expected.tokens
        assert loop.admission.num_decisions >= 100
        assert scheduler.block_owner.counters.num_parks - num_parks >= 10


@pytest.mark.parametrize("max_in_hand_s", [None, 0.2])
def test_the_products_policy_leaves_the_tokens_exact(
    runner: StepRunner, expected: Outcome, max_in_hand_s: float | None
) -> None:
    """Every other request has a reader, who may have enough in hand."""
    level = ServiceLevel(consumption_rate_tps=20.0, max_in_hand_s=max_in_hand_s)
    sampling = {"extra_args": to_extra_args(level)}
    paced = [replace(one, sampling=sampling) if n % 2 else one for n, one in enumerate(mixed())]
    with (
        warm_planner(num_groups=8) as address,
        asking(runner, address, patient=True, policy="evenflow"),
    ):
        counters = runner.scheduler.block_owner.counters
        num_pauses = counters.num_pauses
        outcome = runner.run(paced)

        assert outcome.tokens == expected.tokens
        assert runner.scheduler.loop.admission.num_decisions >= 20
        assert (counters.num_pauses - num_pauses >= 10) is (max_in_hand_s is not None)


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
