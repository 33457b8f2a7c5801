"""How long a plan holds."""

import pytest

from services.control.plans.plan_in_force import PlanInForce
from services.control.types import Trigger
from services.placement.types import Plan, PlanStatus, Quality


def in_force(*, window: int = 8, expires_after: int = 20) -> PlanInForce:
    quality = Quality(
        latency_s=0.01,
        mean_latency_s=0.01,
        first_latency_s=0.01,
        objective_s=0.01,
        lower_bound_s=0.01,
        window=window,
        expires_after=expires_after,
        num_nodes=0,
        serve_all=PlanStatus.FEASIBLE,
    )
    plan = Plan(
        epoch=1, policy="orbitflow", status=PlanStatus.OPTIMAL, placements=(), quality=quality
    )
    return PlanInForce(plan=plan, asked_step=100)


def triggers(plan: PlanInForce, steps: range) -> dict[int, list[Trigger]]:
    return {step: due for step in steps if (due := plan.triggers_at(step))}


def test_the_next_plan_is_asked_for_one_step_before_the_window_ends() -> None:
    assert triggers(in_force(expires_after=500), range(101, 200)) == {107: [Trigger.WINDOW_END]}


def test_expiry_asks_once_more() -> None:
    assert triggers(in_force(), range(101, 200)) == {
        107: [Trigger.WINDOW_END],
        120: [Trigger.EXPIRED],
    }


@pytest.mark.parametrize(("step", "overdue"), [(183, False), (184, True)])
def test_a_plan_is_overdue_long_after_it_has_expired(step: int, overdue: bool) -> None:
    assert in_force().is_overdue(step, overdue_steps=64) is overdue  # 100 + 20 + 64


def test_a_plan_that_predicts_nothing_stays() -> None:
    plan = PlanInForce(
        plan=Plan(epoch=1, policy="vllm", status=PlanStatus.OPTIMAL, placements=()), asked_step=0
    )

    assert plan.triggers_at(10_000) == []
    assert not plan.is_overdue(10_000, overdue_steps=1)
