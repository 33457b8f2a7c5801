"""Our schedulers on real scheduler state, without an engine."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from services.executor.observation import from_plain
from services.executor.request_tag import to_extra_args
from services.executor.scheduler.plain import plain_scheduler
from services.executor.scheduler.plain.plain_scheduler import (
    EvenflowAsyncScheduler,
    EvenflowScheduler,
)
from services.pacing.types import NO_SERVICE_LEVEL, ServiceLevel
from services.placement.run.reason import Reason
from services.placement.types import RequestPhase
from tests.integration.plain_schedulers import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    make_request,
    making,
    observed,
    run_step,
    scheduler_config,
)

PROMISE = ServiceLevel(slo_tbt_s=0.2)


@pytest.fixture(scope="module")
def config() -> Any:
    return scheduler_config()


@pytest.fixture(params=[EvenflowScheduler, EvenflowAsyncScheduler])
def scheduler(request: pytest.FixtureRequest, config: Any) -> Iterator[Scheduler]:
    with making(request.param, config) as made:
        yield made


def test_the_configuration_names_the_scheduler_that_this_platform_takes(config: Any) -> None:
    is_async = config.scheduler_config.async_scheduling
    expected = EvenflowAsyncScheduler if is_async else EvenflowScheduler

    assert config.scheduler_config.get_scheduler_cls() is expected


def promises(scheduler: Any) -> dict[str, ServiceLevel]:
    return {name: record.buffer.service_level for name, record in scheduler.records.items()}


def test_a_promise_is_kept_from_arrival_to_end(scheduler: Any) -> None:
    scheduler.add_request(make_request("promised", PROMISE))
    scheduler.add_request(make_request("plain", None))
    assert promises(scheduler) == {"promised": PROMISE, "plain": NO_SERVICE_LEVEL}

    scheduler.schedule()
    scheduler.check_integrity()
    assert promises(scheduler)["promised"] == PROMISE

    scheduler.finish_requests("promised", RequestStatus.FINISHED_ABORTED)
    scheduler.check_integrity()
    assert promises(scheduler) == {"plain": NO_SERVICE_LEVEL}


def test_a_waiting_request_that_is_aborted_leaves_no_record(scheduler: Any) -> None:
    scheduler.add_request(make_request("waiting", PROMISE))
    scheduler.finish_requests(["waiting"], RequestStatus.FINISHED_ABORTED)

    assert scheduler.records == {}
    scheduler.check_integrity()


def test_the_deposit_is_what_was_generated_and_not_yet_delivered(scheduler: Any) -> None:
    slow = ServiceLevel(consumption_rate_tps=0.001)
    scheduler.add_request(make_request("slow", slow))
    for _ in range(4):
        run_step(scheduler)
    now_s = time.monotonic()
    scheduler.deliver({"slow": (1, now_s), "never here": (3, now_s)})

    (request,) = observed(scheduler).values()
    assert request.num_generated_tokens == 4
    assert request.num_delivered_tokens == 1
    assert request.num_deposited_tokens == 3


def test_what_a_request_thinks_is_not_in_its_reader_s_hand(scheduler: Any) -> None:
    slow = ServiceLevel(consumption_rate_tps=0.001)
    request = make_request("thinks", slow)
    request.sampling_params.extra_args = to_extra_args(slow, reads=False)
    scheduler.add_request(request)
    for _ in range(5):
        run_step(scheduler)
    assert observed(scheduler)["thinks"].num_deposited_tokens == 0

    scheduler.turn({"thinks": (2, True), "never here": (3, True)})  # the first is out at once

    assert observed(scheduler)["thinks"].num_deposited_tokens == 2


def test_a_request_rests_while_its_reader_has_enough(scheduler: Any) -> None:
    level = ServiceLevel(consumption_rate_tps=0.001, max_in_hand_s=3_000.0)
    scheduler.add_request(make_request("rests", level))
    scheduler.add_request(make_request("goes on", ServiceLevel(consumption_rate_tps=0.001)))
    for _ in range(7):
        run_step(scheduler)
    scheduler.check_integrity()

    seen = observed(scheduler)
    assert 3 <= seen["rests"].num_generated_tokens <= 5  # those that are scheduled by then
    assert seen["rests"].phase is RequestPhase.PAUSED
    assert seen["rests"].why is Reason.IN_HAND
    assert seen["goes on"].num_generated_tokens == 7

    scheduler.records["rests"].buffer.turned(0, reads=False, now_s=time.monotonic())
    for _ in range(3):
        run_step(scheduler)
    assert observed(scheduler)["rests"].num_generated_tokens > seen["rests"].num_generated_tokens


def test_counts_for_a_request_that_ended_are_ignored(scheduler: Any) -> None:
    scheduler.add_request(make_request("a", PROMISE))
    run_step(scheduler)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scheduler.deliver({"a": (1, time.monotonic())})

    assert observed(scheduler) == {}
    scheduler.check_integrity()


def test_states_follow_the_request_through_the_scheduler(scheduler: Any) -> None:
    scheduler.add_request(make_request("a", None))
    assert observed(scheduler)["a"].phase is RequestPhase.WAITING
    run_step(scheduler)
    assert observed(scheduler)["a"].phase is RequestPhase.DECODING
    observation = from_plain(scheduler.observe())
    assert observation.num_steps == 1
    assert observation.observed_step_s > 0
    assert observation.num_free_pool_blocks < observation.num_pool_blocks == NUM_BLOCKS - 1


def test_a_held_request_is_passed_over_until_it_is_let_go(scheduler: Any) -> None:
    fast = ServiceLevel(consumption_rate_tps=1e6)
    scheduler.add_request(make_request("held", fast))
    scheduler.add_request(make_request("other", None))
    run_step(scheduler)

    scheduler.hold({"held": True, "never here": True})
    for _ in range(3):
        run_step(scheduler)
    held = observed(scheduler)["held"]
    assert held.phase is RequestPhase.PAUSED
    assert (held.num_generated_tokens, held.num_deposited_tokens) == (1, 1)
    assert observed(scheduler)["other"].num_generated_tokens == 4

    scheduler.hold({"held": False})
    run_step(scheduler)
    held = observed(scheduler)["held"]
    assert held.phase is RequestPhase.DECODING
    assert (held.num_generated_tokens, held.num_deposited_tokens) == (2, 0)


def test_a_held_request_gives_way_to_who_waits_and_is_computed_again(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = NUM_BLOCKS // 2 * BLOCK_SIZE - 8  # of the pool, which one block is not of
    scheduler.add_request(make_request("held", None, num_prompt_tokens=half))
    until_generated(scheduler, "held", 2)
    scheduler.add_request(make_request("waiting", None, num_prompt_tokens=half))
    scheduler.hold({"held": True})
    for _ in range(3):
        run_step(scheduler)
    assert observed(scheduler)["waiting"].num_generated_tokens == 0

    monkeypatch.setattr(plain_scheduler, "MIN_HELD_S", 0.0)
    until_generated(scheduler, "waiting", 3)
    scheduler.check_integrity()
    assert observed(scheduler)["held"].num_generated_tokens == 2
    scheduler.finish_requests("waiting", RequestStatus.FINISHED_ABORTED)
    run_step(scheduler)
    assert observed(scheduler)["held"].num_generated_tokens == 2  # there is room, and no reader

    scheduler.hold({"held": False})
    until_generated(scheduler, "held", 5)
    scheduler.check_integrity()


def test_a_held_request_keeps_its_blocks_while_there_is_room(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_scheduler, "MIN_HELD_S", 0.0)
    scheduler.add_request(make_request("held", None))
    until_generated(scheduler, "held", 2)
    scheduler.hold({"held": True})
    scheduler.add_request(make_request("newcomer", None))
    for _ in range(3):
        run_step(scheduler)

    assert scheduler.requests["held"].status is RequestStatus.RUNNING
    assert scheduler.requests["held"].num_preemptions == 0


def until_generated(scheduler: Any, request_id: str, num_tokens: int) -> None:
    """Run steps until a request has so many tokens, which it has soon."""
    for _ in range(20):
        if observed(scheduler)[request_id].num_generated_tokens >= num_tokens:
            return
        run_step(scheduler)
    raise AssertionError(f"{request_id} does not run")


def test_a_held_request_that_is_aborted_leaves_nothing(scheduler: Any) -> None:
    scheduler.add_request(make_request("held", None))
    run_step(scheduler)
    scheduler.hold({"held": True})
    run_step(scheduler)
    scheduler.finish_requests("held", RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(make_request("held", None))
    run_step(scheduler)

    assert observed(scheduler)["held"].num_generated_tokens == 1
    scheduler.check_integrity()
