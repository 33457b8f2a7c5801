"""What the scheduler does itself, without an engine."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from services.control.step_timing import StepTiming
from services.executor.scheduler import reader_state
from services.executor.step_messages import StepFeedback
from services.pacing.cause import Cause
from services.placement.layer_placement import LayerPlacement
from tests.unit.executor.scheduler_without_engine import SchedulerWithoutEngine
from tests.unit.executor.simulated_scheduler import SimulatedScheduler

pytestmark = pytest.mark.filterwarnings("default")


def make_scheduler() -> SchedulerWithoutEngine:
    return SchedulerWithoutEngine(SimulatedScheduler(num_blocks=41, num_slots=400))


def test_a_placement_of_a_request_that_is_gone_is_counted_and_not_kept() -> None:
    scheduler = make_scheduler()
    scheduler.inner.add("here", 8)

    scheduler.place("gone", LayerPlacement())
    scheduler.place("here", LayerPlacement())

    assert scheduler.records["here"].floor == LayerPlacement()
    assert scheduler.records.keys() == {"here"}
    assert scheduler.inner.block_owner.counters.num_unknown_ids == 1


def test_steps_of_a_pipeline_are_timed_from_output_to_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = make_scheduler()
    step: Any = SimpleNamespace(num_scheduled_tokens={"a": 1}, total_num_scheduled_tokens=1)
    now_s = iter((1.5, 2.0, 2.5))
    clock = SimpleNamespace(monotonic=lambda: next(now_s))
    monkeypatch.setattr(reader_state, "time", clock)
    for began_s in (1.0, 1.01, 1.02):  # scheduled as fast as the pipeline takes them
        scheduler.step_clock.begin(began_s)

    for _ in range(3):
        scheduler.update_from_output(step, SimpleNamespace(kv_connector_output=None))

    assert scheduler.step_clock.last_step_s == pytest.approx(0.5)


@pytest.mark.parametrize(("lacks_plan", "cause"), [(False, Cause.COPIES), (True, Cause.PLANNER)])
def test_a_steps_stall_is_the_copies_unless_there_is_no_plan(
    lacks_plan: bool, cause: Cause
) -> None:
    scheduler = make_scheduler()
    scheduler.recovery = Mock(recover=lambda feedback: [])
    scheduler.loop.controller.lacks_plan = lacks_plan
    step: Any = SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0)
    feedback = StepFeedback(step=1, saved_step=1, timing=StepTiming(stall_s=0.25))
    transferred = SimpleNamespace(kv_connector_worker_meta=feedback)

    scheduler.update_from_output(step, SimpleNamespace(kv_connector_output=transferred))

    assert (scheduler.stall_s, scheduler.stalled_by) == (0.25, cause)


def test_a_request_whose_prompt_must_be_computed_whole_keeps_no_copies_when_preempted() -> None:
    scheduler = make_scheduler()
    request = scheduler.inner.add("a", 8)

    scheduler._preempt_request(request, 0.0)
    request.skip_reading_prefix_cache = True
    scheduler._preempt_request(request, 0.0)

    assert scheduler.kept == ["a", None]
