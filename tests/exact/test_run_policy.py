"""Who runs changes no token: random decisions, and the product's own policy, on a real engine."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from lab.engine.closed_loop import asking
from lab.engine.step_runner import Outcome, StepRunner
from lab.engine.workloads import mixed
from lab.stack.planner_process import warm_planner
from services.control.options import ControllerOptions
from services.executor.request_tag import to_extra_args, with_fairness_id
from services.pacing.types import ServiceLevel
from tests.exact.cases import make_case
from tests.exact.reference import reference
from tests.exact.run_at_random import at_random

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


def test_one_that_was_held_in_the_queue_goes_on_with_nothing_else_there(
    runner: StepRunner, expected: Outcome
) -> None:
    """The policy has decided for as long as nothing changes: it was shown no request."""
    (alone,) = [replace(one, step=0) for one in mixed() if one.request_id == "r1"]

    def hold_for_a_while(scheduler: Any, step: int) -> None:
        for name, record in scheduler.records.items():
            if step == 20:
                scheduler.engine.park(record)
            if step in (20, 60):
                scheduler.hold({name: step == 20})
            if step == 60:
                assert record.is_parked

    with asking(runner, "", policy="evenflow"):
        outcome = runner.run([alone], hook=hold_for_a_while)

        assert outcome.tokens["r1"] == expected.tokens["r1"]
        assert runner.scheduler.block_owner.counters.num_parks


def test_fair_shares_leave_the_tokens_exact(runner: StepRunner, expected: Outcome) -> None:
    """Three of four requests are of one fairness id."""
    names = ["much" if number % 4 else "little" for number in range(len(mixed()))]
    shared = [
        replace(one, sampling={"extra_args": with_fairness_id({}, name)})
        for one, name in zip(mixed(), names, strict=True)
    ]
    with asking(runner, "", policy="evenflow", fairness_half_life_s=1.0) as loop:
        outcome = runner.run(shared)

        assert outcome.tokens == expected.tokens
        assert loop.counts.attained_kv_token_s.keys() == {"much", "little"}
        assert loop.shares.jain_index == 1.0  # all have ended
