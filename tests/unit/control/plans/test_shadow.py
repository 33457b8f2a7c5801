"""Comparing a plan that acts with one that does not."""

import pytest

from lab.planning.snapshots import make_request, make_snapshot
from services.control.plans.shadow import compare
from services.placement.types import Placement, Plan, PlanStatus, RequestPhase
from tests.unit.control.fake_engine import place

SNAPSHOT = make_snapshot(make_request("a", 32_000), make_request("b", 32_000))


def make_plan(*placements: Placement) -> Plan:
    return Plan(epoch=1, policy="deepspeed", status=PlanStatus.FEASIBLE, placements=placements)


RESIDENT = make_plan(place("a"), place("b"))
OFFLOADED = make_plan(place("a", *range(8)), place("b", *range(8)))


def test_a_plan_gains_nothing_over_itself() -> None:
    report = compare(SNAPSHOT, RESIDENT, RESIDENT)

    assert report is not None
    assert report.gain_frac == pytest.approx(0.0)


def test_what_copies_less_gains() -> None:
    report = compare(SNAPSHOT, OFFLOADED, RESIDENT)

    assert report is not None
    assert report.gain_frac == pytest.approx(report.acting_step_s / report.shadow_step_s - 1.0)
    assert report.gain_frac > 0.0


def test_serving_fewer_requests_is_not_a_gain_by_itself() -> None:
    # The step gets shorter by the pause; tokens per second fall all the same.
    report = compare(SNAPSHOT, RESIDENT, make_plan(place("a"), place("b", paused=True)))

    assert report is not None
    assert report.shadow_step_s < report.acting_step_s
    assert report.gain_frac < 0.0


def test_where_nothing_can_be_predicted_nothing_is_said() -> None:
    waiting = make_snapshot(make_request("a", phase=RequestPhase.WAITING))

    assert compare(make_snapshot(make_request("a"), profile=None), OFFLOADED, RESIDENT) is None
    assert compare(waiting, OFFLOADED, RESIDENT) is None
