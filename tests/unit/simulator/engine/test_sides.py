"""Groups that never leave: of windows and of states, beside those that may."""

import random
from dataclasses import replace

import pytest

from lab.policies.presets import full_name
from services.pacing.types import ServiceLevel
from services.placement.blocks import STATE, side_blocks
from services.placement.run.resume import ResumeWay
from services.placement.types import EngineShape, PolicyParameters, RequestId
from simulator.compose import OFFLOADING_PRESET, make_engine
from simulator.device.costs import LinearCosts
from simulator.engine.engine import Engine
from simulator.engine.events import Event
from simulator.engine.machine import Machine
from simulator.engine.planning import PlanningOptions
from simulator.engine.records import RunRecord
from simulator.engine.scheduler import Scheduler, Turn
from simulator.engine.simulation import simulate
from simulator.memory import side_copies
from simulator.memory.requests import SimulatedRequest
from simulator.workload import ArrivingRequest, constant_length, drawn_requests, gamma_gaps
from tests.policies import EVERY

WINDOWS = (10, 10, 10, 10)
WORKING = [
    name for name, preset in EVERY.items() if not preset.recomputes and name != OFFLOADING_PRESET
]


def make_shape(**overrides) -> EngineShape:
    given = {
        "num_layers": 4,
        "layers_per_group": 1,
        "block_size": 4,
        "num_blocks": 240,
        "block_bytes": 1_000,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "num_host_blocks": 4_000,
        "max_model_len": 400,
        "side_windows": WINDOWS,
        "max_in_flight_tokens": 64,
    }
    return EngineShape(**(given | overrides))


def make_sided(policy: str, *, seed: int = 0, **shape) -> Engine:
    costs = LinearCosts(layer_base_s=1.0, outside_step_s=0.5)
    machine = Machine(costs=costs, link_bytes_per_s=40_000.0, chunk_bytes=1_000)
    parameters = PolicyParameters(max_window=32, even_patterns_only=True)
    options = PlanningOptions(policy=policy, parameters=parameters, seed=seed)
    return make_engine(make_shape(**shape), machine, options, seed=seed)


def busy_requests(seed: int = 1) -> list[ArrivingRequest]:
    lengths = (replace(constant_length(60), median=40, largest=120), constant_length(24))
    return drawn_requests(
        gamma_gaps(random.Random(seed), rate_per_s=0.05, cv=2.0),
        lengths,
        num_requests=12,
        seed=seed,
        level=ServiceLevel(slo_tbt_s=6.0),
    )


def run(engine: Engine, requests: list[ArrivingRequest]) -> RunRecord:
    """Simulate; after each event blocks add up, and no request has more than the formula says."""
    geometry = engine.shape.geometry

    def check(event: Event) -> None:
        engine.check_integrity()
        for one in engine.scheduler.live:
            kv, most = one.kv, geometry.max_in_flight_tokens
            if kv.num_side_tokens and kv.num_side_tokens != kv.num_tokens:
                copied = side_copies.num_blocks(kv, kv.num_side_tokens)
                assert kv.num_side_blocks in (0, copied)  # away, or on its way back
                continue
            limit = side_blocks(geometry, num_tokens=kv.num_tokens, num_new_tokens=most)
            assert kv.num_side_blocks <= limit
            assert kv.num_side_tokens or bool(kv.num_side_blocks) == bool(kv.num_tokens)

    return simulate(engine, requests, after_event=check)


@pytest.mark.parametrize("windows", [WINDOWS, (STATE,) * 6], ids=["windows", "states"])
@pytest.mark.parametrize("policy", WORKING)
def test_nothing_is_lost_under_any_policy(policy, windows) -> None:
    requests = busy_requests()
    record = run(make_sided(policy, side_windows=windows), requests)
    answered = {one.request_id: len(one.generated_s) for one in record.outcomes}

    assert answered == {one.request_id: one.num_output_tokens for one in requests}


def test_layers_that_may_leave_do_so_beside_those_that_stay() -> None:
    # 150 tokens take 4 * 38 blocks, and 4 * (9 / 4 + 1 + 1) of windows: too many for 150.
    one = ArrivingRequest(
        request_id=RequestId("a"), arrival_s=0.0, num_prompt_tokens=120, num_output_tokens=30
    )
    record = run(make_sided(full_name("flexgen-plus"), num_blocks=150), [one])

    assert len(record.outcomes[0].generated_s) == 30
    assert record.totals.num_loads > 0


def test_a_window_lets_blocks_go_once_its_chunk_is_computed() -> None:
    # A chunk of 32 tokens takes all 8 blocks of a window; of 41 with one new, ceil(10 / 4) + 1.
    one = ArrivingRequest(
        request_id=RequestId("a"), arrival_s=0.0, num_prompt_tokens=40, num_output_tokens=4
    )
    engine, seen = make_sided("vllm", num_blocks=400), []
    simulate(
        engine,
        [one],
        after_event=lambda _: seen.extend(r.kv.num_side_blocks for r in engine.scheduler.live),
    )

    assert seen[0] == 4 * 8
    assert seen[-1] == 4 * 4


def test_no_copy_is_left_of_a_request_that_gives_way() -> None:
    engine = make_sided("orbitflow", num_blocks=400)
    rng, schedule = random.Random(5), engine.scheduler.schedule

    def preempting(now_s: float) -> list[Turn]:
        scheduler: Scheduler = engine.scheduler
        if scheduler.running and rng.random() < 0.3:
            victim = rng.choice(scheduler.running)
            scheduler.preempt(victim, now_s)
            assert victim.record.kv is None
            assert victim.request_id not in scheduler.pool.owned
        return schedule(now_s)

    engine.scheduler.schedule = preempting
    record = run(engine, busy_requests())

    assert sum(one.num_preemptions for one in record.outcomes) > 10
    assert all(len(one.generated_s) for one in record.outcomes)


def test_vllm_finds_prefixes_beside_windows() -> None:
    shared = [
        ArrivingRequest(
            request_id=RequestId(name),
            arrival_s=at_s,
            num_prompt_tokens=40,
            num_output_tokens=4,
            conversation="c",
        )
        for name, at_s in (("a", 0.0), ("b", 200.0))
    ]
    record = run(make_sided("vllm"), shared)

    assert record.outcomes[1].num_cached_tokens > 0


@pytest.mark.parametrize("windows", [WINDOWS, (STATE,) * 6], ids=["windows", "states"])
def test_who_is_parked_comes_back_at_the_very_token(windows) -> None:
    engine = make_sided("evenflow", side_windows=windows, num_blocks=400)
    rng, scheduler, left = random.Random(5), engine.scheduler, dict[RequestId, int]()
    schedule, preempt, admit = scheduler.schedule, scheduler.preempt, scheduler._admit
    back = list[tuple[int, int]]()

    def parking(now_s: float) -> list[Turn]:
        if scheduler.running and rng.random() < 0.3:
            scheduler.line.engine.park(rng.choice(scheduler.running).record)
        return schedule(now_s)

    def preempting(victim: SimulatedRequest, now_s: float) -> None:
        if victim.kv.is_saved:
            left[victim.request_id] = victim.num_computed_tokens
        preempt(victim, now_s)

    def admitting(budget: int) -> bool:
        if not admit(budget):
            return False
        request = scheduler.running[-1]
        if request.request_id in left:
            back.append((left.pop(request.request_id), request.num_computed_tokens))
        return True

    scheduler.resumes.allow({ResumeWay.LOAD})
    scheduler.resumes.allow = lambda _: None  # whatever pays
    scheduler.schedule, scheduler.preempt, scheduler._admit = parking, preempting, admitting
    record = run(engine, busy_requests())

    assert len(back) > 10
    assert all(before == after for before, after in back)
    assert all(len(one.generated_s) for one in record.outcomes)
    assert record.totals.num_loaded_blocks
