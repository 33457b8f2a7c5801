"""Who runs, and that somebody does: parked requests, held ones, and those in their way."""

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
