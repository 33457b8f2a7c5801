"""Preempted requests come back as in the executor: by load, by recompute, or from the host."""

import pytest

from services.placement.types import EngineShape, RequestId
from simulator.compose import make_engine
from simulator.copies import Lane
from simulator.costs import LinearCosts
from simulator.engine import Engine, Machine
from simulator.planning import PlanningOptions
from simulator.records import RunRecord
from simulator.scheduler import Turn
from simulator.simulation import simulate
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
    return make_engine(SHAPE, machine, PlanningOptions(policy="dynamic-heuristic"))


def run_with_preemption(engine: Engine, *, after_tokens: int) -> tuple[RunRecord, list[int]]:
    """Preempt one request once; return the run, and the tokens that each later step computed."""
    scheduler, schedule = engine.scheduler, engine.scheduler.schedule
    computed: list[int] = []

    def preempting(now_s: float, h2d: Lane) -> list[Turn]:
        for request in list(scheduler.running):
            if request.num_output_tokens == after_tokens and not request.num_preemptions:
                scheduler.preempt(request, now_s)
        turns = schedule(now_s, h2d)
        if scheduler.preempted or computed:
            computed.append(sum(turn.num_tokens for turn in turns))
        return turns

    scheduler.schedule = preempting  # type: ignore[method-assign]
    asked = ArrivingRequest(
        request_id=RequestId("a"), arrival_s=0.0, num_prompt_tokens=90, num_output_tokens=40
    )
    record = simulate(engine, [asked], after_event=lambda event: engine.check_integrity())
    return record, [number for number in computed if number]


@pytest.mark.parametrize(
    ("way", "link_bytes_per_s", "token_s", "num_computed"),
    [
        # 99 of 100 known tokens have KV: 24 blocks of 4 layers, 96,000 bytes, are on the host.
        ("host_resident", 1e6, 0.1, 4),  # each step copies them in 0.1 s, beside 4.9 s of compute
        ("load", 1e4, 0.1, 4),  # once in 9.6 s; all tokens again would take 40 s
        ("recompute", 1e4, 0.001, 64),  # of which the first step takes a whole chunk
    ],
)
def test_a_preempted_request_comes_back_the_cheapest_way(
    way: str, link_bytes_per_s: float, token_s: float, num_computed: int
) -> None:
    engine = make(link_bytes_per_s=link_bytes_per_s, token_s=token_s)
    record, computed = run_with_preemption(engine, after_tokens=10)

    assert {name: number for name, number in record.totals.resumes.items() if number} == {way: 1}
    assert computed[0] == num_computed
    assert record.outcomes[0].num_preemptions == 1
    assert len(record.outcomes[0].generated_s) == 40


def test_without_a_complete_copy_all_is_computed_again() -> None:
    record, computed = run_with_preemption(make(link_bytes_per_s=1.0), after_tokens=10)

    assert not any(record.totals.resumes.values())
    assert computed[:3] == [64, 36, 1]
