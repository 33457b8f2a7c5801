"""Requests that begin alike, on the product's scheduler with a host that is small or off."""

import pytest
from vllm.v1.request import Request, RequestStatus

from lab.engine.orders import resume
from tests.unit.executor.model_free_engine import ModelFreeEngine, names_of
from tests.unit.executor.simulated_ranks import BLOCK_SIZE

pytestmark = pytest.mark.filterwarnings("default")

PREFIX = tuple(f"block {number}" for number in range(60))
NUM_TOKENS = len(PREFIX) * BLOCK_SIZE + 5
NUM_BLOCKS = 401  # a request of the maximum length alone fills it


def engine_with(num_slots: int) -> ModelFreeEngine:
    engine = ModelFreeEngine(num_blocks=NUM_BLOCKS, num_slots=num_slots)
    engine.scheduler.block_owner.trunks.min_tokens = BLOCK_SIZE
    return engine


def burst(engine: ModelFreeEngine, number: int) -> list[Request]:
    return [engine.add(f"r{one}", NUM_TOKENS, PREFIX) for one in range(number)]


@pytest.mark.parametrize("num_slots", [0, 300])
def test_a_burst_computes_what_it_begins_with_once(num_slots: int) -> None:
    engine = engine_with(num_slots)
    requests = burst(engine, 6)

    for _ in range(6):
        ran = engine.step()

    owner = engine.scheduler.block_owner
    assert ran == set(names_of(requests))
    assert owner.counters.num_prefix_hit_tokens == 5 * len(PREFIX) * BLOCK_SIZE
    assert engine.scheduler.transfers.num_duplicate_blocks() == 0
    num_mirrored = sum(one.mirrored for one in owner.kvs)
    assert 0 < num_mirrored < 6 if num_slots else not num_mirrored


@pytest.mark.parametrize("num_slots", [0, 300])
def test_where_a_trunk_fills_the_pool_some_are_preempted_and_all_end(num_slots: int) -> None:
    engine = engine_with(num_slots)
    requests = burst(engine, 4)
    num_found = 0
    for _ in range(600):
        if not engine.scheduler.requests:
            break
        before = {one.request_id for one in engine.scheduler.waiting}
        engine.step()
        for one in engine.scheduler.running:
            is_back = one.num_preemptions and one.request_id in before
            num_found += is_back and engine.kv(one.request_id).num_shared >= len(PREFIX)

    assert all(one.status is RequestStatus.FINISHED_LENGTH_CAPPED for one in requests)
    assert sum(one.num_preemptions for one in requests) > 0
    assert num_found == sum(one.num_preemptions for one in requests)
    assert not engine.scheduler.block_owner.trunks.all


def test_one_that_is_alone_finds_what_it_left_when_it_was_parked() -> None:
    engine = engine_with(0)
    (request,) = burst(engine, 1)
    engine.step()
    engine.park(request.request_id)
    resume(engine.scheduler, request.request_id)

    for _ in range(3):
        engine.step()

    assert request.num_preemptions == 1
    assert engine.kv(request.request_id).num_shared == len(PREFIX)


def test_what_ended_requests_left_is_begun_with() -> None:
    engine = engine_with(0)
    (first,) = burst(engine, 1)
    engine.step()
    engine.scheduler.finish_requests([first.request_id], RequestStatus.FINISHED_ABORTED)
    engine.add("second", NUM_TOKENS, PREFIX)

    for _ in range(3):
        engine.step()

    assert engine.kv("second").num_shared == len(PREFIX)


def test_one_waits_for_room_and_takes_nothing_from_those_that_run_until_then() -> None:
    engine = engine_with(0)
    first = engine.add("first", NUM_TOKENS, PREFIX)
    engine.step()
    engine.park("first")
    other = engine.add("other", 45 * BLOCK_SIZE, tuple(f"other {n}" for n in range(45)))
    assert engine.step() == {"other"}
    resume(engine.scheduler, "first")

    ran = [engine.step() for _ in range(3)]

    # Of 100 positions 45 or 46 are the other's; the first needs 61.
    assert ran == [{"other"}] * 3
    assert not engine.scheduler.block_owner.trunks.all
    engine.scheduler.finish_requests([other.request_id], RequestStatus.FINISHED_ABORTED)
    for _ in range(3):
        engine.step()
    assert first in engine.scheduler.running
    assert engine.kv("first").num_shared >= len(PREFIX) - 6
