"""Our schedulers on real scheduler state, without an engine."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from services.executor.kv_holders import KVUse
from services.executor.observation import from_plain
from services.executor.request_tag import Begun, to_extra_args
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
    holding,
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

    held, waiting = holding(scheduler, "held"), holding(scheduler, "waiting")
    assert held.use.num_pool_tokens >= half
    assert (held.num_recomputed_tokens, held.waited_s, held.why) == (0, 0.0, Reason.READER)
    assert (waiting.use, waiting.phase) == (KVUse(), RequestPhase.WAITING)
    assert waiting.waited_s > 0.0

    monkeypatch.setattr(plain_scheduler, "MIN_HELD_S", 0.0)
    until_generated(scheduler, "waiting", 3)
    scheduler.check_integrity()
    assert observed(scheduler)["held"].num_generated_tokens == 2
    scheduler.finish_requests("waiting", RequestStatus.FINISHED_ABORTED)
    run_step(scheduler)
    assert observed(scheduler)["held"].num_generated_tokens == 2  # there is room, and no reader

    assert holding(scheduler, "held").use == KVUse()
    scheduler.hold({"held": False})
    until_generated(scheduler, "held", 5)
    scheduler.check_integrity()
    assert half < holding(scheduler, "held").num_recomputed_tokens <= half + 3


def test_blocks_of_several_requests_are_told_as_shared(scheduler: Any) -> None:
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, None, num_prompt_tokens=2 * BLOCK_SIZE))
    run_step(scheduler)
    blocks = scheduler.kv_cache_manager.get_blocks("a").blocks[0]
    num_tokens = scheduler.requests["a"].num_computed_tokens
    assert holding(scheduler, "a").use == KVUse(num_pool_tokens=num_tokens)
    blocks[0].ref_cnt += 1  # as vLLM's prefix cache has it

    shared = KVUse(num_pool_tokens=num_tokens - BLOCK_SIZE, num_shared_tokens=BLOCK_SIZE)
    assert holding(scheduler, "a").use == shared


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


BEGUN = Begun([5, 6, 7], 1, time.monotonic() + 600.0, time.monotonic() - 30.0)
READ_AT_ONE = ServiceLevel(consumption_rate_tps=1.0)


def test_an_answer_that_was_begun_elsewhere_has_run_and_has_its_tokens(scheduler: Any) -> None:
    scheduler.add_request(make_request("old", READ_AT_ONE, begun=BEGUN))
    arrived = observed(scheduler)["old"]
    record = scheduler.records["old"]
    assert (arrived.phase, arrived.num_prompt_tokens) == (RequestPhase.PREEMPTED, 40)
    assert (arrived.num_generated_tokens, arrived.num_delivered_tokens) == (3, 1)
    assert arrived.num_deposited_tokens == 2
    assert record.arrival_s == pytest.approx(BEGUN.arrived_s, abs=1e-3)
    assert record.buffer.slack_s(BEGUN.last_due_s) == 1.0
    assert record.first_token_s <= time.monotonic()

    run_step(scheduler)

    assert list(scheduler.requests["old"].output_token_ids)[:4] == [5, 6, 7, 7]
    assert observed(scheduler)["old"].num_generated_tokens == 4


def test_the_newest_token_is_not_the_first_of_as_many_as_it_may_have(scheduler: Any) -> None:
    scheduler.add_request(make_request("old", None, begun=BEGUN, num_output_tokens=4))
    while scheduler.requests:
        run_step(scheduler)

    assert not scheduler.records


VLLM_S_OWN_WARNINGS = pytest.mark.filterwarnings("default:max_rollback_tokens")


def with_form(scheduler: Any, request_id: str, ids: list[int]) -> Any:
    """Return a request whose answer is to be of letters, that the scheduler compiles."""
    form = StructuredOutputsParams(regex="[a-z]{20,}")
    form._backend = "xgrammar"
    begun = Begun(ids, 0, 0.0, 0.0)
    request = make_request(request_id, None, begun=begun, structured_outputs=form)
    scheduler.structured_output_manager.grammar_init(request)
    scheduler.add_request(request)
    assert request.structured_output_request.is_grammar_ready or wait_for(request)
    return request


def wait_for(request: Any) -> bool:
    request.structured_output_request._grammar.result(timeout=60)
    return bool(request.structured_output_request.is_grammar_ready)


def letters(config: Any) -> list[int]:
    """Return tokens of letters alone."""
    tokenizer = AutoTokenizer.from_pretrained(config.model_config.tokenizer)
    return list(tokenizer.encode("abcabc", add_special_tokens=False))


@VLLM_S_OWN_WARNINGS
def test_a_form_is_moved_on_by_what_there_is_of_the_answer(scheduler: Any, config: Any) -> None:
    ids = letters(config)
    request = with_form(scheduler, "formed", ids)
    output = scheduler.schedule()

    assert list(output.num_scheduled_tokens) == ["formed"]
    assert request.structured_output_request.grammar.num_processed_tokens == len(ids)


@VLLM_S_OWN_WARNINGS
def test_a_form_that_does_not_allow_the_answer_ends_that_request_alone(
    scheduler: Any, config: Any
) -> None:
    scheduler.add_request(make_request("other", None))
    with_form(scheduler, "formed", [*letters(config), 1])
    ran = [run_step(scheduler) for _ in range(3)]

    assert "formed" not in scheduler.requests
    assert ran == [["other"]] * 3


def test_one_whose_kv_was_loaded_beside_the_steps_is_new_to_the_workers(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_update_waiting_for_remote_kv", lambda request: None)
    scheduler.add_request(make_request("old", None, begun=BEGUN))
    request = scheduler.requests["old"]
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    scheduler.finished_recving_kv_req_ids.add("old")

    assert scheduler._handle_blocked_waiting_request(request)
    assert request.status == RequestStatus.WAITING
