"""A run policy where layers cannot leave: it says who is admitted, and who is computed again."""

import random
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from services.control.options import ControllerOptions
from services.executor.scheduler.plain import plain_scheduler
from services.executor.scheduler.plain.plain_scheduler import (
    EvenflowAsyncScheduler,
    EvenflowScheduler,
)
from services.pacing.types import ServiceLevel
from services.placement.run.reason import Reason
from services.placement.run.types import RunPhase
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

POOL_TOKENS = (NUM_BLOCKS - 1) * BLOCK_SIZE  # one block is vLLM's own
PERSON = ServiceLevel(consumption_rate_tps=6.0, slo_ttft_s=2.0)


@pytest.fixture(scope="module")
def config() -> Any:
    return scheduler_config(policy="evenflow")


@pytest.fixture(params=[EvenflowScheduler, EvenflowAsyncScheduler])
def scheduler(request: pytest.FixtureRequest, config: Any) -> Iterator[Any]:
    with making(request.param, config) as made:
        yield made


def decided_step(scheduler: Any) -> None:
    """Run a step that the policy is asked before: here hundreds pass while a decision holds."""
    scheduler.loop.changed()
    run_step(scheduler)


def until_begun(scheduler: Any, request_id: str) -> None:
    for _ in range(20):
        run_step(scheduler)
        if observed(scheduler)[request_id].num_generated_tokens:
            return
    raise AssertionError(f"{request_id} does not run")


@pytest.mark.parametrize(("policy", "first"), [("evenflow", "person"), ("vllm", "agent")])
def test_who_waits_for_a_first_token_passes_who_does_not_say_that_he_does(
    policy: str, first: str, scheduler: Any
) -> None:
    scheduler.set_up(ControllerOptions(policy=policy))
    half = POOL_TOKENS // 2  # of the prompt alone: two do not fit
    scheduler.add_request(make_request("runs", None, num_prompt_tokens=half))
    until_begun(scheduler, "runs")
    scheduler.add_request(make_request("agent", None, num_prompt_tokens=half))
    run_step(scheduler)
    scheduler.add_request(make_request("person", PERSON, num_prompt_tokens=half))
    run_step(scheduler)
    assert [name for name, one in observed(scheduler).items() if one.num_generated_tokens] == [
        "runs"
    ]

    scheduler.finish_requests("runs", RequestStatus.FINISHED_ABORTED)
    until_begun(scheduler, first)

    (other,) = {"agent", "person"} - {first}
    assert observed(scheduler)[other].num_generated_tokens == 0
    assert observed(scheduler)[other].why in (Reason.NO_ROOM, Reason.BEHIND, Reason.QUEUE)
    scheduler.check_integrity()


def test_a_batch_that_outgrows_the_pool_sends_its_newest_away_and_it_comes_back(
    scheduler: Any,
) -> None:
    """Three that fit with their prompts, and not with their answers."""
    third = POOL_TOKENS // 3 - 8
    for name in "abc":
        scheduler.add_request(
            make_request(name, None, num_prompt_tokens=third, num_output_tokens=100)
        )
        until_begun(scheduler, name)
    for _ in range(100):
        decided_step(scheduler)
        scheduler.check_integrity()
        if observed(scheduler)["c"].phase is RequestPhase.PREEMPTED:
            break
    assert observed(scheduler)["c"].why is Reason.OUTGROWN
    assert [scheduler.requests[name].num_preemptions for name in "abc"] == [0, 0, 1]

    for _ in range(200):
        run_step(scheduler)
    assert not scheduler.requests
    scheduler.check_integrity()


def test_what_a_stopped_reader_s_request_keeps_is_not_the_policy_s_to_give(scheduler: Any) -> None:
    scheduler.add_request(make_request("held", PERSON, num_prompt_tokens=320))
    until_begun(scheduler, "held")
    assert scheduler.engine.shape.num_blocks == NUM_BLOCKS - 1

    scheduler.hold({"held": True})
    run_step(scheduler)

    num_held = -(-scheduler.requests["held"].num_computed_tokens // BLOCK_SIZE)
    assert num_held >= 10
    assert scheduler.engine.shape.num_blocks == NUM_BLOCKS - 1 - num_held


def test_requests_that_begin_alike_are_counted_once(scheduler: Any) -> None:
    for name, own in (("a", 1), ("b", 2), ("c", 3)):
        request = make_request(name, None, num_prompt_tokens=5 * BLOCK_SIZE)
        request.block_hashes = [bytes([n]) for n in (10, 11, 12, own)]
        scheduler.add_request(request)
    scheduler.hash_block_size = BLOCK_SIZE

    snapshot = scheduler.loop.admission.snapshot(now_s=1.0)

    assert snapshot.prefix_rows == (3,)
    assert [request.prefixes for request in snapshot.requests] == [(0,)] * 3
    assert {request.phase for request in snapshot.requests} == {RunPhase.NEW}


def test_whatever_comes_and_goes_everybody_ends(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_scheduler, "MIN_HELD_S", 0.0)
    num_preemptions = sum(run_at_random(scheduler, random.Random(seed)) for seed in range(8))

    assert num_preemptions >= 3


def run_at_random(scheduler: Any, rng: random.Random) -> int:
    """Let requests come, leave, and stop as it happens; return how often one was preempted."""
    names, num_preemptions = count(), 0
    levels = (None, PERSON, ServiceLevel(consumption_rate_tps=1e6))

    def arrival() -> Request:
        return make_request(
            f"r{next(names)}",
            rng.choice(levels),
            num_prompt_tokens=rng.choice([3, 200, 500]),
            num_output_tokens=rng.choice([1, 100, 400]),
        )

    for _ in range(150):
        live = list(scheduler.requests)
        if rng.random() < 0.3 and len(live) < 12:
            scheduler.add_request(arrival())
        elif rng.random() < 0.05 and live:
            scheduler.finish_requests(rng.choice(live), RequestStatus.FINISHED_ABORTED)
        elif rng.random() < 0.1 and live:
            scheduler.hold({rng.choice(live): rng.random() < 0.5})
        decided_step(scheduler)
        scheduler.check_integrity()
    scheduler.hold(dict.fromkeys(scheduler.requests, False))
    for _ in range(3_000):
        seen = {name: one.num_preemptions for name, one in scheduler.requests.items()}
        decided_step(scheduler)
        left = scheduler.requests.items()
        num_preemptions += sum(one.num_preemptions - seen[name] for name, one in left)
        if not seen:
            break

    assert not scheduler.requests
    assert not scheduler.engine._prefixes._blocks
    return num_preemptions


@pytest.mark.logs("policy_without_effect")
def test_where_no_kv_grows_the_order_is_vllm_s(scheduler: Any) -> None:
    scheduler.engine._growing.clear()

    scheduler.set_up(ControllerOptions(policy="evenflow"))

    assert scheduler.loop is None
    assert scheduler.order.decision is None
