"""Whatever goes wrong with copies: no wrong token leaves, and nothing is lost for good."""

import pytest

from tests.unit.executor.kv.failing_copies import FailingSimulation, FaultRates
from tests.unit.executor.kv.test_block_life import change_at_random, random_tokens

pytestmark = pytest.mark.filterwarnings("default")

ALONE = {
    "failing": FaultRates(fails=0.03),
    "hanging": FaultRates(hangs=0.02),
    "changing": FaultRates(changes=0.03),
}
KINDS = {**ALONE, "all-together": FaultRates(fails=0.02, hangs=0.015, changes=0.02)}


def run(sim: FailingSimulation, num_steps: int = 150) -> None:
    for _ in range(num_steps):
        sim.settle()
        change_at_random(sim)
        if sim.rng.random() < 0.1:
            sim.planner.relieve()
        sim.step(random_tokens(sim))
    sim.end_all()


def assert_whole(sim: FailingSimulation) -> None:
    assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1
    assert sim.owner.host.num_free == sim.num_slots
    assert sim.owner.quarantine.num_blocks == sim.owner.quarantine.num_slots == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_no_wrong_token_leaves_whatever_copies_do(seed: int, kind: str, depth: int) -> None:
    sim = FailingSimulation(seed=seed, depth=depth, num_slots=500, rates=KINDS[kind])

    run(sim)

    assert_whole(sim)
    assert sum(rank.engine.num_faults for rank in sim.ranks) > 5
    assert sim.num_lost > 0
    assert sim.num_tokens_out > 30


@pytest.mark.parametrize("kind", KINDS)
def test_class_6_rank_divergence_a_failure_on_one_rank_is_acted_on_by_all(kind: str) -> None:
    sim = FailingSimulation(
        seed=11, num_ranks=3, num_slots=500, rates=KINDS[kind], only_first_rank=True
    )

    run(sim)

    assert_whole(sim)
    assert sim.ranks[0].engine.num_faults > 0
    assert sim.ranks[1].engine.num_faults == 0
    assert sim.num_lost > 0
    generations = [rank.runner._tables._generations for rank in sim.ranks]
    assert generations[0] == generations[1] == generations[2]
