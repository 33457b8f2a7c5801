"""What vLLM sees of its queue while a decision is in force, and who leaves because of one."""

from typing import Any

import pytest

from services.executor.scheduler.scheduler import LayerwiseSchedulerMixin
from services.placement.run.types import RunDecision
from services.placement.types import RequestId
from tests.unit.executor.model_free_engine import (
    ModelFreeEngine,
    make_request,
    make_scheduler,
    names_of,
)

pytestmark = pytest.mark.filterwarnings("default")


def make(names: str, decided: RunDecision | None = None) -> LayerwiseSchedulerMixin:
    """Return a scheduler with such a queue, and a decision in force."""
    scheduler = make_scheduler()
    for number, name in enumerate(names):
        scheduler.add_request(make_request(name, 8, arrival_time=float(number)))
    scheduler.line.obey(decided)
    return scheduler


def decision(run: str, **more: Any) -> RunDecision:
    return RunDecision(run=tuple(RequestId(name) for name in run), **more)


def queue_of(scheduler: LayerwiseSchedulerMixin) -> str:
    return "".join(names_of(scheduler.waiting))


def test_before_anybody_decides_the_queue_is_vllms() -> None:
    scheduler = make("abc")

    with scheduler.control.admitting():
        assert queue_of(scheduler) == "abc"


def test_while_vllm_schedules_the_queue_is_the_decisions_and_then_whole_again() -> None:
    scheduler = make("abcd", decision("dxb"))  # x has gone

    with scheduler.control.admitting():
        assert queue_of(scheduler) == "db"
        scheduler.waiting.pop_request()  # vLLM admits it
    assert queue_of(scheduler) == "bac"


def test_what_vllm_preempts_meanwhile_stays_at_the_head() -> None:
    scheduler = make("ab", decision("b"))

    with scheduler.control.admitting():
        scheduler.waiting.prepend_request(make_request("p", 8))
    assert queue_of(scheduler) == "pba"


def test_the_queue_is_whole_again_whatever_happens() -> None:
    scheduler = make("abc")
    whole = scheduler.max_num_scheduled_tokens
    scheduler.line.obey(decision("c", chunk_tokens=7))

    with pytest.raises(RuntimeError), scheduler.control.admitting():
        raise RuntimeError
    assert sorted(queue_of(scheduler)) == ["a", "b", "c"]
    assert scheduler.max_num_scheduled_tokens == whole


def test_prompts_share_what_the_decision_gives_them_and_decodes_come_first() -> None:
    scheduler = make("a")
    whole = scheduler.max_num_scheduled_tokens
    for name, num_left in (("p", 60), ("d", 1)):
        request = make_request(name, 100)
        request.num_computed_tokens = 100 - num_left
        scheduler.running.append(request)
    scheduler.line.obey(decision("pda", chunk_tokens=32))

    with scheduler.control.admitting():
        assert scheduler.max_num_scheduled_tokens == 33
        assert names_of(scheduler.running) == ["d", "p"]
    assert scheduler.max_num_scheduled_tokens == whole

    scheduler.line.obey(decision("pda", chunk_tokens=whole + 1))
    with scheduler.control.admitting():
        assert scheduler.max_num_scheduled_tokens == whole


def test_who_is_sent_away_leaves_at_once_and_comes_back_without_being_asked() -> None:
    engine = ModelFreeEngine(num_blocks=401, num_slots=0)  # nothing can be copied
    scheduler = engine.scheduler
    engine.add("a", 20)
    request = engine.add("b", 20)
    engine.step()
    assert names_of(scheduler.running) == ["a", "b"]

    record = scheduler.records["b"]
    scheduler.engine.park(record)
    assert record.is_held
    scheduler.control.stop_and_start()

    assert names_of(scheduler.running) == ["a"]
    assert request.num_preemptions == 1
    assert scheduler.block_owner.counters.num_parks == 1
    assert not record.is_held
    assert "b" in engine.step()


def test_who_has_a_token_in_flight_leaves_when_it_is_known_unless_called_back() -> None:
    engine = ModelFreeEngine(num_blocks=401)
    scheduler = engine.scheduler
    request = engine.add("a", 20)
    engine.step()
    request.num_in_flight_tokens = 1

    scheduler.engine.park(scheduler.records["a"])
    scheduler.control.stop_and_start()
    assert names_of(scheduler.running) == ["a"]

    request.num_in_flight_tokens = 0
    scheduler.line.obey(decision("a"))
    assert engine.step() == {"a"}
    assert request.num_preemptions == 0


@pytest.mark.parametrize("offloads", [True, False])
def test_one_that_has_given_layers_up_is_called_back_only_where_layers_may_be_away(
    offloads: bool,
) -> None:
    engine = ModelFreeEngine(num_blocks=401)
    scheduler = engine.scheduler
    request = engine.add("a", 20)
    engine.step()
    request.num_in_flight_tokens = 1
    scheduler.engine.park(scheduler.records["a"])
    scheduler.block_owner.offload(engine.kv("a"), [0])  # for others who need the room

    request.num_in_flight_tokens = 0
    scheduler.line.obey(decision("a", offloads=offloads))
    scheduler.control.stop_and_start()

    assert (request.num_preemptions == 0) == offloads


def test_drafts_of_decodes_are_beside_what_a_step_computes_of_prompts() -> None:
    engine = ModelFreeEngine()
    request = engine.add("a", 8)
    for _ in range(3):
        engine.step()
    scheduler = engine.scheduler
    scheduler.line.obey(decision("a", chunk_tokens=7))
    request.spec_token_ids = [1, 2, 3]

    with scheduler.control.admitting():
        assert scheduler.max_num_scheduled_tokens == 1 + 3 + 7
