"""Who runs, and that somebody does: parked requests, held ones, and those in their way."""

import threading

import pytest

from services.executor.kv.residency import LayerPlacement
from services.placement.resume import ResumeWay
from tests.unit.executor.kv.simulated_scheduler import SimulatedScheduler

pytestmark = pytest.mark.filterwarnings("default")


def with_parked(num_tokens: dict[str, int], *, num_blocks: int = 41) -> SimulatedScheduler:
    """Return a scheduler whose requests have all been parked, and wait in this order."""
    scheduler = SimulatedScheduler(num_blocks=num_blocks, num_slots=400)
    for name, length in num_tokens.items():
        scheduler.add(name, length)
        for _ in range(4):
            scheduler.step()
        scheduler.park(name)
    scheduler.waiting.sort(key=lambda request: list(num_tokens).index(request.request_id))
    return scheduler


def test_the_first_of_two_that_come_back_gets_what_it_needs_before_the_second() -> None:
    scheduler = with_parked({"a": 14, "b": 22})
    scheduler.control.resume("b")
    scheduler.control.resume("a")

    ran = [scheduler.step() for _ in range(40)]

    assert all("a" in names for names in ran[-10:])


def test_one_that_came_back_too_early_is_put_back_when_nobody_can_run() -> None:
    scheduler = with_parked({"a": 14, "b": 22})
    load_without_regard_to_others(scheduler, "b")
    load_without_regard_to_others(scheduler, "a")
    assert scheduler.block_owner.blocks.num_free == 0

    ran = [scheduler.step() for _ in range(12)]

    assert all("a" in names for names in ran[-6:])


def load_without_regard_to_others(scheduler: SimulatedScheduler, request_id: str) -> None:
    """Fill all blocks of a parked request, and do not admit it."""
    scheduler.control.resume(request_id)
    while scheduler.block_owner.requests[request_id].asleep:
        scheduler.control.resumes.prepare(
            request_id,
            lambda kv: (ResumeWay.LOAD, LayerPlacement()),
            num_slots=0,
            num_kept_free=0,
        )
        scheduler._batch = []
        scheduler._run()
        scheduler.transfers.settle()


class CountedEvent(threading.Event):
    """Counts how often somebody waits for it, and lets nobody wait."""

    num_waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.num_waits += 1
        return True


@pytest.mark.parametrize(("num_in_flight", "num_waits"), [(0, 1), (1, 0)])
def test_an_empty_step_slows_the_engine_down_only_when_no_other_is_in_flight(
    num_in_flight: int, num_waits: int
) -> None:
    scheduler = SimulatedScheduler(num_blocks=41, num_slots=400)
    request = scheduler.add("a", 8)
    for _ in range(3):
        scheduler.step()
    scheduler.transfers.settle()
    scheduler.control.pause("a")
    event = scheduler.control._wake = CountedEvent()

    request.num_in_flight_tokens = num_in_flight
    scheduler.control.after_step(num_scheduled=0)

    assert event.num_waits == num_waits
