"""What the scheduler does itself, without an engine."""

import pytest

from services.executor.kv.residency import LayerPlacement
from tests.unit.executor.kv.scheduler_without_engine import SchedulerWithoutEngine
from tests.unit.executor.kv.simulated_scheduler import SimulatedScheduler

pytestmark = pytest.mark.filterwarnings("default")


def make_scheduler() -> SchedulerWithoutEngine:
    return SchedulerWithoutEngine(SimulatedScheduler(num_blocks=41, num_slots=400))


def test_a_placement_of_a_request_that_is_gone_is_counted_and_not_kept() -> None:
    scheduler = make_scheduler()
    scheduler.inner.add("here", 8)

    scheduler.place("gone", LayerPlacement())
    scheduler.place("here", LayerPlacement())

    assert scheduler.capacity_guard._given.keys() == {"here"}
    assert scheduler.control.num_unknown_ids == 1
