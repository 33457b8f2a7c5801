"""What vLLM sees of its queue while a decision is in force, and who leaves because of one."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.request_queue import FCFSRequestQueue

from services.executor.scheduler.run_line import RunLine
from services.placement.run.types import RunDecision, RunPhase
from services.placement.types import RequestId
from tests.unit.executor.simulated_scheduler import SimulatedScheduler
from tests.unit.placement.run.snapshots import make_engine
from tests.unit.records import make_record

pytestmark = pytest.mark.filterwarnings("default")


class Waiting:
    """A request in the queue."""

    def __init__(self, name: str, arrival_time: float) -> None:
        self.request_id, self.arrival_time = name, arrival_time
        self.priority = self.num_preemptions = 0


class Running(Waiting):
    def __init__(self, name: str, *, num_left: int) -> None:
        super().__init__(name, 0.0)
        self.num_tokens, self.num_computed_tokens = 100, 100 - num_left


def make(names: str) -> tuple[Any, RunLine]:
    """Return a scheduler with such a queue, and its line."""
    inner = SimulatedScheduler(num_blocks=41, num_slots=400)
    queue = FCFSRequestQueue()
    for number, name in enumerate(names):
        queue.add_request(Waiting(name, float(number)))
        inner.records[name] = make_record(name)
    scheduler: Any = SimpleNamespace(waiting=queue, running=[], max_num_scheduled_tokens=512)
    return scheduler, RunLine(scheduler, inner.control, make_engine())


def decision(run: str, **more: Any) -> RunDecision:
    return RunDecision(run=tuple(RequestId(name) for name in run), **more)


def names_of(queue: Any) -> str:
    return "".join(request.request_id for request in queue)


def test_before_anybody_decides_the_queue_is_vllms() -> None:
    scheduler, line = make("abc")

    with line.admitting():
        assert names_of(scheduler.waiting) == "abc"
    assert [place.phase for place in line.run_places()] == [RunPhase.NEW] * 3


def test_while_vllm_schedules_the_queue_is_the_decisions_and_then_whole_again() -> None:
    scheduler, line = make("abcd")
    line.obey(decision("dxb"))  # x has gone

    with line.admitting():
        assert names_of(scheduler.waiting) == "db"
        scheduler.waiting.pop_request()  # vLLM admits it
    assert names_of(scheduler.waiting) == "bac"


def test_what_vllm_preempts_meanwhile_stays_at_the_head() -> None:
    scheduler, line = make("ab")
    line.obey(decision("b"))

    with line.admitting():
        scheduler.waiting.prepend_request(Waiting("p", 9.0))
    assert names_of(scheduler.waiting) == "pba"


def test_the_queue_is_whole_again_whatever_happens() -> None:
    scheduler, line = make("abc")
    line.obey(decision("c", chunk_tokens=7))

    with pytest.raises(RuntimeError), line.admitting():
        raise RuntimeError
    assert sorted(names_of(scheduler.waiting)) == ["a", "b", "c"]
    assert scheduler.max_num_scheduled_tokens == 512


def test_prompts_share_what_the_decision_gives_them_and_decodes_come_first() -> None:
    scheduler, line = make("a")
    scheduler.running = [Running(name, num_left=left) for name, left in (("p", 60), ("d", 1))]
    line.obey(decision("pda", chunk_tokens=32))

    with line.admitting():
        assert scheduler.max_num_scheduled_tokens == 33
        assert names_of(scheduler.running) == "dp"
    assert scheduler.max_num_scheduled_tokens == 512

    line.obey(decision("pda", chunk_tokens=600))
    with line.admitting():
        assert scheduler.max_num_scheduled_tokens == 512


def test_the_queue_is_shown_by_arrival_whatever_its_order() -> None:
    scheduler, line = make("abc")
    scheduler.waiting.prepend_request(scheduler.waiting.pop())

    assert [place.request.request_id for place in line.run_places()] == ["a", "b", "c"]


def test_who_is_sent_away_leaves_at_once_and_comes_back_without_being_asked() -> None:
    scheduler = SimulatedScheduler(num_blocks=401, num_slots=0)  # nothing can be copied
    scheduler.add("a", 20)
    request = scheduler.add("b", 20)
    scheduler.step()
    assert {one.request_id for one in scheduler.running} == {"a", "b"}

    record = scheduler.records["b"]
    scheduler.control.holds.leave(record)
    assert record.is_held
    scheduler.control.stop_and_start()

    assert [one.request_id for one in scheduler.running] == ["a"]
    assert request.num_preemptions == 1
    assert scheduler.block_owner.counters.num_parks == 1
    assert not record.is_held
    assert "b" in scheduler.step()


def test_who_has_a_token_in_flight_leaves_when_it_is_known_unless_called_back() -> None:
    scheduler = SimulatedScheduler(num_blocks=401, num_slots=400)
    request = scheduler.add("a", 20)
    scheduler.step()
    request.num_in_flight_tokens = 1

    scheduler.control.holds.leave(scheduler.records["a"])
    scheduler.control.stop_and_start()
    assert [one.request_id for one in scheduler.running] == ["a"]

    request.num_in_flight_tokens = 0
    scheduler.control.resume(scheduler.records["a"])
    assert scheduler.step() == {"a"}
    assert request.num_preemptions == 0
