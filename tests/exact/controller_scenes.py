"""Scenes that move the controller's metrics: tests of `test_metrics.py`, which has the engine."""

import time
from dataclasses import replace
from typing import Any

import grpc
import pytest

from evenflow.planner.v1 import planner_pb2 as pb
from lab.engine.closed_loop import asking
from lab.engine.step_runner import Arrival, Hook, StepRunner, make_prompt
from services.executor.request_tag import with_fairness_id
from services.placement.run.evenflow import decide as evenflow
from services.placement.run.types import RunDecision, RunSnapshot
from services.placement.types import PolicyParameters
from tests.exact.scenes import sees
from tests.scripted_planner import Answer, keep_everything, scripted_planner

STEADY = [  # the later ones come when steps without prompts have been measured
    Arrival(
        request_id=f"s{number}",
        prompt=make_prompt(100, seed=90 + number),
        num_output_tokens=30,
        step=step,
    )
    for number, step in enumerate((0, 12, 14))
]


def lasting(snapshot: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
    """Answer with a plan that holds for as long as the batch does."""
    plan = keep_everything(snapshot, context)
    plan.quality.window = 64
    return plan


def run_planned(
    runner: StepRunner,
    answer: Answer = keep_everything,
    *,
    hook: Hook | None = None,
    patient: bool = True,
    **options: Any,
) -> None:
    """Run a steady batch for a planner that answers so."""
    with scripted_planner() as planner:
        planner.answer = answer
        with asking(runner, planner.address, patient=patient, **options):
            runner.scheduler.log_stats = True
            runner.run(STEADY, hook=hook)


@sees(
    "controller_num_steps",
    "controller_step_s",
    "controller_controller_s",
    "controller_num_decodes",
    "controller_num_decoded_tokens",
    "controller_num_predicted_steps",
    "controller_predicted_step_s",
    "controller_measured_step_s",
    "controller_abs_error_s",
    "controller_last_predicted_step_s",
    "controller_last_measured_step_s",
    "controller_num_predicted_prompt_steps",
    "controller_measured_prompt_step_s",
    "controller_prompt_abs_error_s",
    "controller_plans",
    "controller_plans{asked}",
    "controller_plans{applied}",
    "controller_lateness_s_sum",
    "controller_lateness_s_count",
    "controller_lateness_steps_count",
    "controller_triggers",
    "controller_triggers{admitted}",
    "controller_triggers{prefilled}",
    "controller_triggers{mirrored}",
    "controller_triggers{finished}",
    "controller_triggers{calibrated}",
    "controller_triggers{window_end}",
)
def test_plans_are_asked_for_and_carried_out(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    run_planned(runner)


@sees("controller_lateness_steps_sum")
def test_a_plan_comes_some_steps_later(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def late(snapshot: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
        asked_at = len(steps)
        while context.is_active() and len(steps) < asked_at + 4:
            time.sleep(1e-3)
        return keep_everything(snapshot, context)

    run_planned(runner, late, hook=lambda scheduler, step: steps.append(step), patient=False)


@sees("controller_triggers{expired}", "controller_plans{dropped_overdue}")
def test_a_plan_does_not_hold(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    def once(snapshot: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
        plan = keep_everything(snapshot, context)
        plan.quality.expires_after = 2
        return plan if snapshot.epoch == 1 else pb.Plan()

    run_planned(runner, once, overdue_steps=1)


@pytest.mark.logs("planner_failed", "planner_answered_again")
@sees(
    "controller_plans{failed_internal}",
    "controller_triggers{retry}",
)
def test_a_planner_fails_and_is_asked_again(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    def fail_once(snapshot: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
        if snapshot.epoch == 1:
            context.abort(grpc.StatusCode.INTERNAL, "out of order")
        return keep_everything(snapshot, context)

    run_planned(runner, fail_once, retry_s=1e-9)


@sees("controller_triggers{pause_endable}")
def test_a_plan_pauses_a_request(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    def pausing(snapshot: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
        plan = keep_everything(snapshot, context)
        for placement in plan.placements:
            placement.paused = placement.request_id == "s1"
        return plan

    parameters = PolicyParameters(min_pause_s=1e-6, max_pause_s=0.2)
    run_planned(runner, pausing, parameters=parameters)


@sees("controller_triggers{aborted}")
def test_a_request_is_aborted(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    runner.run([replace(STEADY[0], abort_at=5)])


@sees("controller_triggers{mismatch}")
def test_steps_take_another_time_than_predicted(
    runner: StepRunner, patch: pytest.MonkeyPatch
) -> None:
    run_planned(runner, lasting, mismatch_frac=1e-9)


@pytest.mark.logs("shadow_plan")
@sees(
    "controller_shadow_gain_frac",
    "controller_shadow_step_s",
    "controller_acting_step_s",
)
def test_another_policy_is_compared(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    def answer(snapshot: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
        plan = keep_everything(snapshot, context)
        if snapshot.policy == "layerkv":
            plan.placements[0].paused = True  # it serves one request less
        return plan

    run_planned(runner, answer, shadow_policy="layerkv")


@sees("controller_reasons", "controller_triggers{layers_leave}")
def test_a_run_policy_decides(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    def decide(snapshot: RunSnapshot) -> RunDecision:
        return RunDecision(run=tuple(r.request_id for r in snapshot.requests), offloads=True)

    run_planned(runner, run_policy=decide)


@sees(
    "controller_fairness_jain_frac",
    "controller_attained_kv_token_s",
    "controller_attained_kv_token_s{alice}",
    "controller_attained_kv_token_s{bob}",
)
def test_fairness_ids_hold_the_pool(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    ids = {"s0": "alice", "s1": "bob", "s2": "bob"}
    batch = [
        replace(one, sampling={"extra_args": with_fairness_id({}, ids[one.request_id])})
        for one in STEADY
    ]
    with (
        scripted_planner() as planner,
        asking(runner, planner.address, run_policy=evenflow, fairness_half_life_s=60.0),
    ):
        runner.scheduler.log_stats = True
        runner.run(batch)
