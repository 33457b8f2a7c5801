"""Who runs, and that somebody does: parked requests, held ones, and those in their way."""

import threading

import pytest

from services.executor.scheduler.run_control import need_of
from services.placement.layer_placement import LayerPlacement
from services.placement.run.resume import ResumeWay
from tests.unit.executor.simulated_scheduler import SimulatedScheduler

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
    scheduler.control.resume(scheduler.records["b"])
    scheduler.control.resume(scheduler.records["a"])

    ran = [scheduler.step() for _ in range(40)]

    assert all("a" in names for names in ran[-10:])


def test_one_that_came_back_too_early_is_put_back_when_nobody_can_run() -> None:
    scheduler = with_parked({"a": 14, "b": 22})
    load_without_regard_to_others(scheduler, "b")
    load_without_regard_to_others(scheduler, "a")
    assert scheduler.block_owner.blocks.num_free == 0

    ran = [scheduler.step() for _ in range(12)]

    assert all("a" in names for names in ran[-6:])


def test_room_is_made_for_one_in_line_only_while_one_more_may_run() -> None:
    scheduler = SimulatedScheduler(num_blocks=41, num_slots=400)
    scheduler.max_num_running_reqs = 2
    for name in ("a", "b"):
        scheduler.add(name, 14)
        scheduler.step()
    scheduler.add("c", 14)

    in_line_when_full = scheduler.control.next_in_line()
    scheduler.finish("a")

    assert in_line_when_full == []
    assert [request.request_id for request in scheduler.control.next_in_line()] == ["c"]


def load_without_regard_to_others(scheduler: SimulatedScheduler, request_id: str) -> None:
    """Fill all blocks of a parked request, and do not admit it."""
    record = scheduler.records[request_id]
    scheduler.control.resume(record)
    while scheduler.sim.kv(request_id).asleep:
        scheduler.control.resumes.prepare(
            record,
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
    scheduler.control.holds.pause(scheduler.records["a"])
    event = scheduler.control._wake = CountedEvent()

    request.num_in_flight_tokens = num_in_flight
    scheduler.control.after_step(num_scheduled=0)

    assert event.num_waits == num_waits


def test_a_token_that_is_sampled_and_not_yet_known_needs_room_too() -> None:
    scheduler = SimulatedScheduler(num_blocks=41, num_slots=400, num_placeholders=1)
    request = scheduler.add("a", 8)
    for _ in range(3):
        scheduler.step()

    need = need_of(request, scheduler.records["a"])
    assert need.num_tokens == request.num_tokens + 1 == request.num_known_or_not


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_reset_drops_the_kv_of_a_request_that_is_coming_back(num_steps: int) -> None:
    """Without a step its loads are not under way yet; with one they are, or it is awake."""
    scheduler = with_parked({"a": 14})
    owner = scheduler.block_owner
    scheduler.control.resume(scheduler.records["a"])
    scheduler.progress = lambda: None  # type: ignore[method-assign]
    scheduler.max_num_running_reqs = 1
    scheduler.control.prepare_resumes(lambda request: 0)
    assert scheduler.sim.kv("a").owned_blocks()
    for _ in range(num_steps):
        scheduler._batch = []
        scheduler._run()

    owner.drop_all_waiting()

    assert scheduler.records["a"].kv is None
    owner.check_integrity()
    scheduler.progress = SimulatedScheduler.progress.__get__(scheduler)  # type: ignore[method-assign]
    assert any("a" in scheduler.step() for _ in range(10))
