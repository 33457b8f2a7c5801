"""The loop on an engine in memory: when it asks, what it carries out, how it lives without."""

from types import SimpleNamespace
from typing import Any

import pytest

from lab.policies.presets import full_name
from services.control.controller import Controller
from services.control.measures.step_timing import StepTiming
from services.control.options import ControllerOptions
from services.control.plans.planner import Answer
from services.control.requests.life import Hold
from services.control.requests.request_ledger import RequestLedger
from services.control.seam import ScheduledStep
from services.control.types import Trigger
from services.placement.types import Placement, Plan, PlanStatus, Quality
from tests.unit.control.fake_engine import PARAMETERS, FakeEngine, FakePlanner, place


class Loop:
    """A controller with its engine and planner, and a clock that stands still between steps."""

    def __init__(self, *names: str, **options: Any) -> None:
        self.now_s = 1_000.0
        self.engine, self.planner = FakeEngine(*names), FakePlanner()
        values = {"planner_address": "x", "parameters": PARAMETERS} | options
        self.controller = Controller(
            ControllerOptions(**values),
            self.engine,
            self.planner,
            RequestLedger(self.engine.records),
            lambda: self.now_s,
        )

    def hold(self, name: str, *, held: bool) -> None:
        record = self.engine.records[name]
        (record.hold if held else record.release)(Hold.READER, self.now_s)

    def step(self, *, step_s: float = 0.02, same_batch: bool = True) -> None:
        self.controller.before_schedule()
        num_running = len(self.engine.names) - len(self.engine.paused)
        self.controller.after_schedule(
            ScheduledStep(
                scheduled_s=self.now_s,
                num_tokens=num_running,
                num_context_tokens=1_600 * num_running,
                num_prefill_tokens=0,
                num_prefill_pairs=0,
                same_batch=same_batch,
                undisturbed=True,
            )
        )
        self.now_s += step_s
        self.controller.after_update(StepTiming(layer_s=2e-3), busy=True)

    def steps(self, number: int, **options: Any) -> None:
        for _ in range(number):
            self.step(**options)

    def answer(self, *placements: Placement, epoch: int | None = None, **quality: Any) -> None:
        """Let the planner answer its newest question."""
        number = self.planner.asked[-1].epoch if epoch is None else epoch
        values = {
            "latency_s": 0.02,
            "mean_latency_s": 0.02,
            "first_latency_s": 0.02,
            "objective_s": 0.02,
            "lower_bound_s": 0.02,
            "window": 64,
            "expires_after": 128,
            "num_nodes": 0,
            "serve_all": PlanStatus.FEASIBLE,
        }
        plan = Plan(
            epoch=number,
            policy="orbitflow",
            status=PlanStatus.FEASIBLE,
            placements=placements,
            quality=Quality(**(values | quality)),
        )
        self.planner.answers.append(Answer(epoch=number, plan=plan))

    @property
    def triggers(self) -> dict[str, int]:
        return dict(self.controller.counts.triggers)

    @property
    def plans(self) -> dict[str, int]:
        return dict(self.controller.counts.plans)


def planned(*placements: Placement, **quality: Any) -> Loop:
    """Return a loop of requests "a" and "b" whose first plan is in force."""
    loop = Loop("a", "b")
    loop.steps(6)
    loop.answer(*placements, **quality)
    loop.step()
    return loop


def test_the_first_question_waits_for_a_profile() -> None:
    loop = Loop("a")
    loop.controller.note(Trigger.ADMITTED)
    loop.steps(4)
    assert loop.planner.asked == []

    loop.steps(1)

    assert [snapshot.epoch for snapshot in loop.planner.asked] == [1]
    assert loop.triggers == {"admitted": 1, "calibrated": 1}


def test_without_a_trigger_nobody_is_asked() -> None:
    loop = planned(place("a"), place("b"))
    asked = len(loop.planner.asked)

    loop.steps(30)

    assert len(loop.planner.asked) == asked


def test_who_runs_is_decided_anew_when_a_prompt_is_complete() -> None:
    loop, changes = Loop("a"), []
    loop.controller.director = SimpleNamespace(changed=lambda: changes.append("changed"))

    loop.controller.note(Trigger.PREFILLED)

    assert changes == ["changed"]


def test_several_reasons_in_one_step_make_one_question() -> None:
    loop = planned(place("a"), place("b"))
    asked = len(loop.planner.asked)

    loop.controller.note(Trigger.FINISHED, Trigger.ADMITTED, Trigger.PREFILLED)
    loop.steps(3)

    assert len(loop.planner.asked) == asked + 1


def test_a_plan_is_carried_out_before_the_step_after_its_question() -> None:
    loop = planned(place("a"), place("b", 1, 5))

    assert loop.engine.placed == {"b": (1, 5)}
    assert loop.plans == {"asked": 1, "applied": 1}


def test_the_next_plan_is_asked_for_before_the_window_ends() -> None:
    loop = planned(place("a"), place("b"), window=8)
    loop.steps(8)

    assert loop.triggers["window_end"] == 1
    assert len(loop.planner.asked) == 2


def test_steps_unlike_the_predicted_ones_ask() -> None:
    loop = planned(place("a"), place("b"))
    loop.steps(10)
    assert "mismatch" not in loop.triggers

    loop.steps(10, step_s=0.04)

    assert loop.triggers["mismatch"] == 1
    assert len(loop.planner.asked) == 2


def test_while_the_batch_changes_at_every_step_nothing_is_compared() -> None:
    loop = planned(place("a"), place("b"))

    loop.steps(40, step_s=0.04, same_batch=False)

    assert "mismatch" not in loop.triggers


@pytest.mark.parametrize("epoch", [0, 99])
def test_an_answer_of_another_epoch_changes_nothing(epoch: int) -> None:
    loop = planned(place("a"), place("b", 3))

    loop.answer(place("a", 1), epoch=epoch)
    loop.step()

    assert loop.engine.placed == {"b": (3,)}


def test_an_older_plan_never_replaces_a_newer_one() -> None:
    loop = planned(place("a"), place("b", 3))
    loop.controller.note(Trigger.ADMITTED)
    loop.step()
    loop.controller.note(Trigger.ADMITTED)
    loop.step()

    loop.answer(place("a", 7))  # to the newest question
    loop.answer(place("a", 2), epoch=2)  # to the one before
    loop.step()

    assert loop.engine.placed["a"] == (7,)
    assert loop.plans["ignored_superseded"] == 1


def test_a_failed_call_is_repeated_after_a_while() -> None:
    loop = planned(place("a"), place("b"))
    asked = len(loop.planner.asked)
    loop.planner.answers.append(Answer(epoch=2, failure="UNAVAILABLE"))

    loop.steps(40)  # 0.8 s
    assert len(loop.planner.asked) == asked
    loop.steps(20)  # beyond retry_s = 1

    assert loop.plans["failed_unavailable"] == 1
    assert loop.triggers["retry"] == 1
    assert len(loop.planner.asked) == asked + 1


def test_between_an_answer_that_is_none_and_the_next_plan_there_is_no_plan() -> None:
    loop = planned(place("a"), place("b"))
    assert not loop.controller.lacks_plan
    loop.planner.answers.append(Answer(epoch=2, failure="UNAVAILABLE"))

    loop.steps(60)  # beyond retry_s = 1
    assert loop.controller.lacks_plan
    loop.answer(place("a"), place("b"))
    loop.step()

    assert not loop.controller.lacks_plan


def test_after_a_plan_that_came_too_late_the_planner_is_asked_again() -> None:
    loop = planned(place("a"), place("b"), window=500, expires_after=500)
    loop.controller.note(Trigger.ADMITTED)
    loop.step()
    loop.answer(place("a", 1), expires_after=2)
    asked = len(loop.planner.asked)
    loop.planner.answers, late = [], loop.planner.answers

    loop.steps(3)
    loop.planner.answers = late
    loop.steps(60)  # beyond retry_s = 1

    assert loop.plans["ignored_expired"] == 1
    assert len(loop.planner.asked) == asked + 1


def test_a_plan_that_nobody_renews_is_dropped_long_after_it_has_expired() -> None:
    loop = planned(place("a", 1), place("b", paused=True), window=8, expires_after=16)
    assert loop.engine.paused == {"b"}

    loop.steps(60, step_s=0.001)
    assert loop.engine.placed == {"a": (1,)}
    loop.steps(30, step_s=0.001)  # 16 + 64 steps after the question

    assert loop.engine.placed == {}
    assert loop.engine.paused == set()
    assert loop.plans["dropped_overdue"] == 1


def test_a_pause_is_carried_out_and_ended_by_plans() -> None:
    loop = planned(place("a"), place("b", paused=True))
    assert loop.engine.paused == {"b"}
    loop.controller.note(Trigger.FINISHED)
    loop.step()

    loop.answer(place("a"), place("b"))
    loop.step()

    record = loop.engine.records["b"]
    assert loop.engine.paused == set()
    assert not record.holds
    assert record.resumed_s is not None
    assert loop.triggers["resumed"] == 1


def test_a_pause_that_has_lasted_long_enough_is_a_reason_to_ask_once() -> None:
    loop = planned(place("a"), place("b", paused=True))
    loop.steps(45)
    assert "pause_endable" not in loop.triggers

    loop.steps(30)  # beyond min_pause_s = 1

    assert loop.triggers["pause_endable"] == 1


def test_nobody_is_paused_longer_than_allowed_whatever_the_planner_does() -> None:
    loop = planned(place("a"), place("b", paused=True), expires_after=100_000)

    loop.steps(495)
    assert loop.engine.paused == {"b"}
    loop.steps(10)  # 500 steps of 20 ms are max_pause_s

    assert loop.engine.paused == set()


def test_of_a_batch_that_is_all_paused_one_runs_at_once() -> None:
    loop = planned(place("a", paused=True), place("b", paused=True))

    loop.step()

    assert len(loop.engine.paused) == 1


def test_a_reader_that_has_stopped_is_not_resumed() -> None:
    loop = planned(place("a"), place("b", paused=True))
    loop.hold("b", held=True)
    loop.controller.note(Trigger.FINISHED)
    loop.step()

    loop.answer(place("a"), place("b"))
    loop.steps(600)

    assert loop.engine.paused == {"b"}


def test_a_hold_stops_a_request_that_the_plan_lets_run_and_asks() -> None:
    loop = planned(place("a"), place("b"))
    asked = len(loop.planner.asked)

    loop.hold("b", held=True)
    loop.hold("b", held=True)
    loop.step()

    assert loop.engine.paused == {"b"}
    assert loop.triggers["held"] == 1
    assert len(loop.planner.asked) == asked + 1


def test_who_is_let_go_runs_again_though_a_plan_has_paused_it() -> None:
    loop = planned(place("a"), place("b", paused=True))
    loop.hold("b", held=True)
    loop.step()

    loop.hold("b", held=False)
    loop.step()

    assert loop.engine.paused == set()
    assert not loop.engine.records["b"].holds


def test_a_hold_that_the_engine_has_ended_is_over() -> None:
    """Its author may have died: the engine ends every hold after a while."""
    loop = planned(place("a"), place("b"))
    loop.hold("b", held=True)
    loop.step()

    loop.hold("b", held=False)
    loop.step()
    loop.hold("b", held=True)

    assert loop.engine.paused == {"b"}


def test_requests_that_ended_meanwhile_are_skipped() -> None:
    loop = Loop("a", "b")
    loop.steps(6)
    del loop.engine.records["b"]

    loop.answer(place("a", 3), place("b", 3))
    loop.step()

    assert loop.engine.placed == {"a": (3,)}


def test_policies_that_replan_at_batch_changes_only_are_left_alone_otherwise() -> None:
    loop = Loop("a", policy=full_name("flexgen-plus"))
    loop.steps(6)
    asked = len(loop.planner.asked)

    loop.controller.note(Trigger.WINDOW_END, Trigger.MISMATCH)
    loop.steps(3)
    assert len(loop.planner.asked) == asked
    loop.controller.note(Trigger.ADMITTED)
    loop.step()

    assert len(loop.planner.asked) == asked + 1


def test_a_policy_of_every_step_asks_every_step() -> None:
    loop = Loop("a", policy="layerkv")
    loop.steps(6)
    asked = len(loop.planner.asked)

    loop.steps(5)

    assert len(loop.planner.asked) == asked + 5


def test_the_end_of_the_loop_ends_its_planner() -> None:
    loop = Loop("a")

    loop.controller.close()

    assert loop.planner.closed
