"""The loop on an engine in memory: when it asks, what it carries out, how it lives without."""

from typing import Any

import pytest

from lab.planning.snapshots import BLOCK_SIZE
from lab.policies.presets import full_name
from services.control.measures.step_timing import StepTiming
from services.control.options import ControllerOptions
from services.control.plans.planner import PlanAnswer
from services.control.requests.life import Hold
from services.control.step_loop import StepLoop
from services.control.types import ScheduledStep, Trigger
from services.placement.presets import Run
from services.placement.run.types import RunDecision, RunSnapshot
from services.placement.types import (
    Placement,
    Plan,
    PlanStatus,
    PrefixPlacement,
    Quality,
)
from tests.unit.control.fake_engine import PARAMETERS, FakeEngine, FakePlanner, place


class Bench:
    """A step loop with its engine and planner, and a clock that stands still between steps."""

    def __init__(self, *names: str, run_policy: Run | None = None, **options: Any) -> None:
        self.now_s = 1_000.0
        self.engine, self.planner = FakeEngine(*names), FakePlanner()
        values = {"planner_address": "x", "parameters": PARAMETERS} | options
        self.loop = StepLoop(
            ControllerOptions(**values),
            self.engine.line(),
            self.planner,
            run_policy,
            lambda: self.now_s,
        )

    def hold(self, name: str, *, held: bool) -> None:
        record = self.engine.records[name]
        (record.hold if held else record.release)(Hold.READER, self.now_s)

    def step(self, *, step_s: float = 0.02, same_batch: bool = True) -> None:
        self.loop.before_schedule()
        num_running = len(self.engine.names) - len(self.engine.paused)
        self.loop.after_schedule(
            ScheduledStep(
                request_ids=tuple(self.engine.names),
                scheduled_s=self.now_s,
                num_tokens=num_running,
                num_context_tokens=1_600 * num_running,
                num_prefill_tokens=0,
                num_prefill_pairs=0,
                same_batch=same_batch,
                undisturbed=True,
            ),
            self.now_s,
        )
        self.now_s += step_s
        self.loop.after_update(StepTiming(layer_s=2e-3), busy=True)

    def steps(self, number: int, **options: Any) -> None:
        for _ in range(number):
            self.step(**options)

    def answer(
        self,
        *placements: Placement,
        epoch: int | None = None,
        prefixes: tuple[PrefixPlacement, ...] = (),
        **quality: Any,
    ) -> None:
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
            prefixes=prefixes,
        )
        self.planner.answers.append(PlanAnswer(epoch=number, plan=plan))

    @property
    def triggers(self) -> dict[str, int]:
        return dict(self.loop.counts.triggers)

    @property
    def plans(self) -> dict[str, int]:
        return dict(self.loop.counts.plans)


def planned(*placements: Placement, **quality: Any) -> Bench:
    """Return a loop of requests "a" and "b" whose first plan is in force."""
    bench = Bench("a", "b")
    bench.steps(6)
    bench.answer(*placements, **quality)
    bench.step()
    return bench


def test_the_first_question_waits_for_a_profile() -> None:
    bench = Bench("a")
    bench.loop.note(Trigger.ADMITTED)
    bench.steps(4)
    assert bench.planner.asked == []

    bench.steps(1)

    assert [snapshot.epoch for snapshot in bench.planner.asked] == [1]
    assert bench.triggers == {"admitted": 1, "calibrated": 1}


def test_without_a_trigger_nobody_is_asked() -> None:
    bench = planned(place("a"), place("b"))
    asked = len(bench.planner.asked)

    bench.steps(30)

    assert len(bench.planner.asked) == asked


def test_fairness_ids_attain_what_they_hold_from_decision_to_decision_while_they_have_any() -> None:
    def decide(snapshot: RunSnapshot) -> RunDecision:
        return RunDecision(run=tuple(r.request_id for r in snapshot.requests), valid_for_s=9.0)

    bench = Bench("a", "b", run_policy=decide, fairness_half_life_s=100.0)
    for name, num_blocks in (("a", 8), ("b", 24)):
        record = bench.engine.records[name]
        record.fairness_id, record.kv.num_owned = name, num_blocks
    bench.steps(2, step_s=0.5)
    counts = bench.loop.counts
    assert counts.attained_kv_token_s == pytest.approx({"a": BLOCK_SIZE, "b": 3 * BLOCK_SIZE})
    assert counts.gauges["fairness_jain_frac"] == pytest.approx(0.8)  # 4^2 / (2 x 10)

    bench.loop.ended(num_output_tokens=5)
    del bench.engine.records["b"]
    bench.now_s += 1_000.0  # nothing runs
    bench.step(step_s=0.5)
    assert counts.attained_kv_token_s == pytest.approx({"a": 1.5 * BLOCK_SIZE, "b": 3 * BLOCK_SIZE})
    assert counts.gauges["fairness_jain_frac"] == 1.0


def test_without_shares_nothing_is_counted_of_ids() -> None:
    bench = Bench("a", run_policy=lambda snapshot: RunDecision(run=()))
    bench.steps(2)

    assert bench.loop.counts.take()["attained_kv_token_s"] == {}
    assert "fairness_jain_frac" not in bench.loop.counts.gauges


def test_who_runs_is_decided_anew_when_a_prompt_is_complete() -> None:
    asked: list[RunSnapshot] = []

    def decide(snapshot: RunSnapshot) -> RunDecision:
        asked.append(snapshot)
        return RunDecision(run=(), valid_for_s=1_000.0)

    bench = Bench("a", run_policy=decide)
    bench.steps(3)
    assert len(asked) == 1

    bench.loop.note(Trigger.WINDOW_END)
    bench.step()
    assert len(asked) == 1
    bench.loop.note(Trigger.PREFILLED)
    bench.step()

    assert len(asked) == 2


def test_the_planner_is_asked_only_while_the_run_policy_lets_layers_leave() -> None:
    decision = RunDecision(run=())  # decided anew in every step
    bench = Bench("a", run_policy=lambda snapshot: decision)
    bench.loop.note(Trigger.ADMITTED)
    bench.steps(8)
    assert bench.planner.asked == []

    decision = RunDecision(run=(), offloads=True)
    bench.steps(3)

    assert bench.triggers["layers_leave"] == len(bench.planner.asked) == 1
    assert bench.loop.counts.reasons == {"not_named": 1}


def test_several_reasons_in_one_step_make_one_question() -> None:
    bench = planned(place("a"), place("b"))
    asked = len(bench.planner.asked)

    bench.loop.note(Trigger.FINISHED, Trigger.ADMITTED, Trigger.PREFILLED)
    bench.steps(3)

    assert len(bench.planner.asked) == asked + 1


def test_a_plan_is_carried_out_before_the_step_after_its_question() -> None:
    bench = planned(place("a"), place("b", 1, 5))

    assert bench.engine.placed == {"b": (1, 5)}
    assert bench.plans == {"asked": 1, "applied": 1}


def test_the_next_plan_is_asked_for_before_the_window_ends() -> None:
    bench = planned(place("a"), place("b"), window=8)
    bench.steps(8)

    assert bench.triggers["window_end"] == 1
    assert len(bench.planner.asked) == 2


def test_steps_unlike_the_predicted_ones_ask() -> None:
    bench = planned(place("a"), place("b"))
    bench.steps(10)
    assert "mismatch" not in bench.triggers

    bench.steps(10, step_s=0.04)

    assert bench.triggers["mismatch"] == 1
    assert len(bench.planner.asked) == 2


def test_while_the_batch_changes_at_every_step_nothing_is_compared() -> None:
    bench = planned(place("a"), place("b"))

    bench.steps(40, step_s=0.04, same_batch=False)

    assert "mismatch" not in bench.triggers


@pytest.mark.parametrize("epoch", [0, 99])
def test_an_answer_of_another_epoch_changes_nothing(epoch: int) -> None:
    bench = planned(place("a"), place("b", 3))

    bench.answer(place("a", 1), epoch=epoch)
    bench.step()

    assert bench.engine.placed == {"b": (3,)}


def test_an_older_plan_never_replaces_a_newer_one() -> None:
    bench = planned(place("a"), place("b", 3))
    bench.loop.note(Trigger.ADMITTED)
    bench.step()
    bench.loop.note(Trigger.ADMITTED)
    bench.step()

    bench.answer(place("a", 7))  # to the newest question
    bench.answer(place("a", 2), epoch=2)  # to the one before
    bench.step()

    assert bench.engine.placed["a"] == (7,)
    assert bench.plans["ignored_superseded"] == 1


def test_a_failed_call_is_repeated_after_a_while() -> None:
    bench = planned(place("a"), place("b"))
    asked = len(bench.planner.asked)
    bench.planner.answers.append(PlanAnswer(epoch=2, failure="UNAVAILABLE"))

    bench.steps(40)  # 0.8 s
    assert len(bench.planner.asked) == asked
    bench.steps(20)  # beyond retry_s = 1

    assert bench.plans["failed_unavailable"] == 1
    assert bench.triggers["retry"] == 1
    assert len(bench.planner.asked) == asked + 1


def test_between_an_answer_that_is_none_and_the_next_plan_there_is_no_plan() -> None:
    bench = planned(place("a"), place("b"))
    assert not bench.loop.planning.lacks_plan
    bench.planner.answers.append(PlanAnswer(epoch=2, failure="UNAVAILABLE"))

    bench.steps(60)  # beyond retry_s = 1
    assert bench.loop.planning.lacks_plan
    bench.answer(place("a"), place("b"))
    bench.step()

    assert not bench.loop.planning.lacks_plan


def test_after_a_plan_that_came_too_late_the_planner_is_asked_again() -> None:
    bench = planned(place("a"), place("b"), window=500, expires_after=500)
    bench.loop.note(Trigger.ADMITTED)
    bench.step()
    bench.answer(place("a", 1), expires_after=2)
    asked = len(bench.planner.asked)
    bench.planner.answers, late = [], bench.planner.answers

    bench.steps(3)
    bench.planner.answers = late
    bench.steps(60)  # beyond retry_s = 1

    assert bench.plans["ignored_expired"] == 1
    assert len(bench.planner.asked) == asked + 1


def test_a_plan_that_nobody_renews_is_dropped_long_after_it_has_expired() -> None:
    bench = planned(place("a", 1), place("b", paused=True), window=8, expires_after=16)
    assert bench.engine.paused == {"b"}

    bench.steps(60, step_s=0.001)
    assert bench.engine.placed == {"a": (1,)}
    bench.steps(30, step_s=0.001)  # 16 + 64 steps after the question

    assert bench.engine.placed == {}
    assert bench.engine.paused == set()
    assert bench.plans["dropped_overdue"] == 1


def test_a_pause_is_carried_out_and_ended_by_plans() -> None:
    bench = planned(place("a"), place("b", paused=True))
    assert bench.engine.paused == {"b"}
    bench.loop.note(Trigger.FINISHED)
    bench.step()

    bench.answer(place("a"), place("b"))
    bench.step()

    record = bench.engine.records["b"]
    assert bench.engine.paused == set()
    assert not record.holds
    assert record.resumed_s is not None
    assert bench.triggers["resumed"] == 1


def test_a_pause_that_has_lasted_long_enough_is_a_reason_to_ask_once() -> None:
    bench = planned(place("a"), place("b", paused=True))
    bench.steps(45)
    assert "pause_endable" not in bench.triggers

    bench.steps(30)  # beyond min_pause_s = 1

    assert bench.triggers["pause_endable"] == 1


def test_nobody_is_paused_longer_than_allowed_whatever_the_planner_does() -> None:
    bench = planned(place("a"), place("b", paused=True), expires_after=100_000)

    bench.steps(495)
    assert bench.engine.paused == {"b"}
    bench.steps(10)  # 500 steps of 20 ms are max_pause_s

    assert bench.engine.paused == set()


def test_of_a_batch_that_is_all_paused_one_runs_at_once() -> None:
    bench = planned(place("a", paused=True), place("b", paused=True))

    bench.step()

    assert len(bench.engine.paused) == 1


def test_a_reader_that_has_stopped_is_not_resumed() -> None:
    bench = planned(place("a"), place("b", paused=True))
    bench.hold("b", held=True)
    bench.loop.note(Trigger.FINISHED)
    bench.step()

    bench.answer(place("a"), place("b"))
    bench.steps(600)

    assert bench.engine.paused == {"b"}


def test_a_hold_stops_a_request_that_the_plan_lets_run_and_asks() -> None:
    bench = planned(place("a"), place("b"))
    asked = len(bench.planner.asked)

    bench.hold("b", held=True)
    bench.hold("b", held=True)
    bench.step()

    assert bench.engine.paused == {"b"}
    assert bench.triggers["held"] == 1
    assert len(bench.planner.asked) == asked + 1


def test_who_is_let_go_runs_again_though_a_plan_has_paused_it() -> None:
    bench = planned(place("a"), place("b", paused=True))
    bench.hold("b", held=True)
    bench.step()

    bench.hold("b", held=False)
    bench.step()

    assert bench.engine.paused == set()
    assert not bench.engine.records["b"].holds


def test_a_hold_that_the_engine_has_ended_is_over() -> None:
    """Its author may have died: the engine ends every hold after a while."""
    bench = planned(place("a"), place("b"))
    bench.hold("b", held=True)
    bench.step()

    bench.hold("b", held=False)
    bench.step()
    bench.hold("b", held=True)

    assert bench.engine.paused == {"b"}


def test_requests_that_ended_meanwhile_are_skipped() -> None:
    bench = Bench("a", "b")
    bench.steps(6)
    del bench.engine.records["b"]

    bench.answer(place("a", 3), place("b", 3))
    bench.step()

    assert bench.engine.placed == {"a": (3,)}


def test_policies_that_replan_at_batch_changes_only_are_left_alone_otherwise() -> None:
    bench = Bench("a", policy=full_name("flexgen-plus"))
    bench.steps(6)
    asked = len(bench.planner.asked)

    bench.loop.note(Trigger.WINDOW_END, Trigger.MISMATCH)
    bench.steps(3)
    assert len(bench.planner.asked) == asked
    bench.loop.note(Trigger.ADMITTED)
    bench.step()

    assert len(bench.planner.asked) == asked + 1


def test_a_policy_of_every_step_asks_every_step() -> None:
    bench = Bench("a", policy="layerkv")
    bench.steps(6)
    asked = len(bench.planner.asked)

    bench.steps(5)

    assert len(bench.planner.asked) == asked + 5


def test_the_end_of_the_loop_ends_its_planner() -> None:
    bench = Bench("a")

    bench.loop.close()

    assert bench.planner.closed
