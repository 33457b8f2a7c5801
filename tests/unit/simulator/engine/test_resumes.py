"""Preempted requests come back as in the executor: by load, by recompute, or from the host."""

from collections.abc import Sequence

import pytest

from lab.policies.presets import full_name
from services.placement.types import EngineShape, RequestId
from simulator.compose import make_engine
from simulator.device.costs import LinearCosts
from simulator.engine.engine import Engine
from simulator.engine.machine import Machine
from simulator.engine.planning import PlanningOptions
from simulator.engine.records import RunRecord
from simulator.engine.scheduler import Turn
from simulator.engine.simulation import simulate
from simulator.memory.kv import KVState
from simulator.memory.requests import SimulatedRequest, live_request
from simulator.workload import ArrivingRequest

SHAPE = EngineShape(
    num_layers=4,
    layers_per_group=1,
    block_size=4,
    num_blocks=400,
    block_bytes=1_000,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    num_host_blocks=4_000,
    max_model_len=400,
)


def make(*, link_bytes_per_s: float, token_s: float = 0.1) -> Engine:
    """Return an engine of four layers; `token_s`: of a token in one layer."""
    costs = LinearCosts(layer_base_s=1.0, per_token_s=token_s, outside_step_s=0.5)
    machine = Machine(costs=costs, link_bytes_per_s=link_bytes_per_s, chunk_bytes=1_000)
    return make_engine(SHAPE, machine, PlanningOptions(policy=full_name("dynamic-heuristic")))


def asked(name: str, *, num_prompt_tokens: int) -> ArrivingRequest:
    return ArrivingRequest(
        request_id=RequestId(name),
        arrival_s=0.0,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=40,
    )


def run_with_preemption(
    engine: Engine, *, after_tokens: int, others: Sequence[ArrivingRequest] = ()
) -> tuple[RunRecord, list[int]]:
    """Preempt request "a" once; return the run, and the tokens that each later step computed."""
    scheduler, schedule = engine.scheduler, engine.scheduler.schedule
    computed: list[int] = []

    def preempting(now_s: float) -> list[Turn]:
        for request in list(scheduler.running):
            is_first = request.request_id == "a" and not request.num_preemptions
            if is_first and request.num_output_tokens == after_tokens:
                scheduler.preempt(request, now_s)
        turns = schedule(now_s)
        if scheduler.preempted or computed:
            computed.append(sum(turn.num_tokens for turn in turns))
        return turns

    scheduler.schedule = preempting  # type: ignore[method-assign]
    record = simulate(
        engine,
        [asked("a", num_prompt_tokens=90), *others],
        after_event=lambda event: engine.check_integrity(),
    )
    return record, [number for number in computed if number]


@pytest.mark.parametrize(
    ("way", "link_bytes_per_s", "token_s", "others", "num_computed"),
    [
        # 99 of 100 known tokens have KV: 24 blocks of 4 layers, 96,000 bytes, are on the host.
        # 0.01 s more of two requests' step, or one that goes on for 4.9 s without it.
        ("host_resident", 1e7, 0.1, [asked("b", num_prompt_tokens=8)], 5),
        ("load", 1e6, 0.1, [], 4),  # in 0.1 s, and nobody waits
        ("load", 1e4, 0.1, [], 4),  # in 9.6 s; all tokens again would take 40 s
        ("recompute", 1e4, 0.001, [], 64),  # of which the first step takes a whole chunk
    ],
)
def test_a_preempted_request_comes_back_the_cheapest_way(
    way: str,
    link_bytes_per_s: float,
    token_s: float,
    others: list[ArrivingRequest],
    num_computed: int,
) -> None:
    engine = make(link_bytes_per_s=link_bytes_per_s, token_s=token_s)
    record, computed = run_with_preemption(engine, after_tokens=10, others=others)

    assert {name: number for name, number in record.totals.resumes.items() if number} == {way: 1}
    assert computed[0] == num_computed
    outcome = next(one for one in record.outcomes if one.request_id == "a")
    assert outcome.num_preemptions == 1
    assert len(outcome.generated_s) == 40


def test_without_a_complete_copy_all_is_computed_again() -> None:
    record, computed = run_with_preemption(make(link_bytes_per_s=1.0), after_tokens=10)

    assert not any(record.totals.resumes.values())
    assert computed[:3] == [64, 36, 1]


def parked(engine: Engine, name: str, *, num_blocks: int) -> SimulatedRequest:
    """Return a request at the end of the queue that has so many blocks per layer on the host."""
    scheduler = engine.scheduler
    request = live_request(asked(name, num_prompt_tokens=90), scheduler.geometry)
    kv = KVState(request_id=name, geometry=scheduler.geometry, mirrored=True)
    kv.grow(4 * num_blocks)
    kv.num_sent_blocks = kv.num_copied_blocks = num_blocks
    request.record.kv = kv.parked()
    assert scheduler.host.set_owned(request.request_id, 4 * num_blocks)
    scheduler.add(request)
    return request


@pytest.mark.parametrize(
    ("num_free", "kept"),
    [
        # "a" asks for room for 130 tokens: 33 blocks of 4 layers, 132 slots; 20 of them it has.
        (112, {"short", "long"}),
        (111, {"long"}),  # "short" holds 8
        (103, set()),  # "long" holds 40
    ],
)
def test_who_comes_back_takes_host_room_from_parked_ones_shortest_first(
    num_free: int, kept: set[str]
) -> None:
    engine = make(link_bytes_per_s=1e4)
    first = parked(engine, "a", num_blocks=5)
    others = [parked(engine, "long", num_blocks=10), parked(engine, "short", num_blocks=2)]
    host = engine.scheduler.host
    assert host.set_owned(RequestId("rest"), host.num_free - num_free)

    assert engine.scheduler.moves.promise(first, 132)
    assert {one.request_id for one in others if one.kv.is_parked} == kept
    assert first.kv.num_host_blocks == 5
    assert host.owned[first.request_id] == 132


def test_a_paused_request_that_is_all_on_the_host_keeps_its_copies() -> None:
    """It owns no block, as a parked one, but goes on from there."""
    engine = make(link_bytes_per_s=1e4)
    scheduler = engine.scheduler
    first, paused = (parked(engine, name, num_blocks=5) for name in ("a", "paused"))
    scheduler.waiting.remove(paused)
    scheduler.running.append(paused)
    paused.num_computed_tokens = 20
    rest = scheduler.host.num_free - 100  # 132 - 20 are asked; "paused" has 20
    assert scheduler.host.set_owned(RequestId("rest"), rest)

    assert not scheduler.moves.promise(first, 132)
    assert paused.kv.num_host_blocks == 5


def test_nothing_is_dropped_where_it_would_not_be_enough() -> None:
    engine = make(link_bytes_per_s=1e4)
    first, other = (parked(engine, name, num_blocks=5) for name in ("a", "b"))
    host = engine.scheduler.host
    assert host.set_owned(RequestId("rest"), host.num_free - 91)  # 132 - 20 are asked, "b" has 20

    assert not engine.scheduler.moves.promise(first, 132)
    assert other.kv.is_parked
    assert host.owned[other.request_id] == 20


def test_a_request_that_finds_no_room_in_the_pool_costs_nobody_host_room() -> None:
    engine = make(link_bytes_per_s=1e4)
    scheduler = engine.scheduler
    newcomer = live_request(asked("new", num_prompt_tokens=90), scheduler.geometry)
    scheduler.add(newcomer)
    behind = parked(engine, "behind", num_blocks=5)
    assert scheduler.host.set_owned(RequestId("rest"), scheduler.host.num_free - 120)
    assert scheduler.pool.set_owned(RequestId("rest"), 399)

    assert not scheduler.schedule(0.0)
    assert behind.kv.is_parked
    assert newcomer.request_id not in scheduler.host.owned

    scheduler.pool.release(RequestId("rest"))
    assert scheduler.schedule(0.0)
    assert not behind.kv.is_parked


def test_blocks_of_one_that_is_prepared_go_before_a_running_one_is_preempted() -> None:
    engine = make(link_bytes_per_s=1e4)
    scheduler = engine.scheduler
    running = live_request(asked("runs", num_prompt_tokens=40), scheduler.geometry)
    scheduler.add(running)
    assert scheduler.schedule(0.0)
    ready = parked(engine, "ready", num_blocks=10)
    assert ready.kv.wake(num_free=scheduler.pool.num_free)
    scheduler.moves.refresh(ready.kv)
    running.step_ended(1.0)
    assert scheduler.pool.set_owned(RequestId("rest"), scheduler.pool.num_free)

    assert not scheduler.schedule(1.0)
    assert running.num_preemptions == 0
    assert ready.kv.is_parked
