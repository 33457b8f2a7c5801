"""Requests that begin alike share blocks, on simulated ranks: each reads its own tokens only."""

from collections import Counter
from dataclasses import dataclass, field

import pytest

from services.executor.blocks.residency import Trunk
from services.executor.blocks.trunks import Trunks
from tests.unit.executor.blocks.test_prefix_hits import (
    KINDS,
    Conversations,
    assert_all_is_given_back,
)
from tests.unit.executor.failing_copies import FailingSimulation
from tests.unit.executor.simulated_ranks import BLOCK_SIZE, Simulation

pytestmark = pytest.mark.filterwarnings("default")


def sharing(sim: Simulation) -> Trunks:
    """Let even single blocks be shared."""
    sim.owner.trunks.min_tokens = BLOCK_SIZE
    return sim.owner.trunks


@dataclass
class Seen:
    """What has happened to trunks."""

    num_users: Counter[int] = field(default_factory=Counter)  # over steps
    num_moves: Counter[str] = field(default_factory=Counter)
    num_depths: Counter[int] = field(default_factory=Counter)  # trunks of a request


class Agents(Conversations):
    """Conversations whose trunks are moved about, too."""

    def __init__(self, sim: Simulation, seen: Seen) -> None:
        super().__init__(sim)
        self.trunks, self.seen = sharing(sim), seen

    def step(self) -> None:
        rng, sim = self.sim.rng, self.sim
        for holder in list(sim.owner.holders()):
            if holder.mirrored and not holder.asleep and rng.random() < 0.2:
                if isinstance(holder, Trunk):
                    self.count_move(holder)
                sim.place(holder, self.placement())
        if rng.random() < 0.05:
            sim.transfers.relieve()
        if rng.random() < 0.1:
            self.sleep_one()
        super().step()
        self.seen.num_users.update(len(trunk.users) for trunk in self.trunks.all)
        self.seen.num_depths.update(len(kv.trunks) for kv in sim.owner.kvs)

    def count_move(self, trunk: Trunk) -> None:
        self.seen.num_moves["restoring"] += bool(trunk.restoring)
        self.seen.num_moves["offloaded"] += bool(trunk.offloaded)

    def sleep_one(self) -> None:
        """Take the staging of trunks whose users are all on their way back."""
        for trunk in self.trunks.all:
            if all(user.asleep for user in trunk.users):
                self.seen.num_moves["asleep"] += not trunk.asleep
                self.sim.owner.staging.drop(trunk)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_slots", [60, 300])
@pytest.mark.parametrize("num_blocks", [60, 120])
def test_whoever_shares_blocks_reads_its_own_tokens(
    depth: int, num_slots: int, num_blocks: int
) -> None:
    seen, num_joins, num_splits = Seen(), 0, 0
    for seed in range(3):
        sim = Simulation(seed=seed, depth=depth, num_slots=num_slots, num_blocks=num_blocks)
        drill = Agents(sim, seen)
        for _ in range(180):
            drill.step()
        drill.end_all()
        sim.drain()
        assert_all_is_given_back(sim)
        assert not drill.trunks.all
        num_joins += sim.owner.counters.num_trunk_joins
        num_splits += sim.owner.counters.num_trunk_splits

    assert num_joins > 20
    assert num_splits > 10
    assert seen.num_users[2] > 50
    assert seen.num_depths[2] > 0
    assert seen.num_moves["offloaded"] > 10


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_that_goes_wrong_costs_all_users_of_a_trunk(kind: str, depth: int) -> None:
    num_joins = num_lost = 0
    for seed in range(4):
        sim = FailingSimulation(seed=seed, depth=depth, num_slots=300, rates=KINDS[kind])
        drill = Agents(sim, Seen())
        for _ in range(200):
            drill.step()
        drill.end_all()
        sim.end_all()
        assert_all_is_given_back(sim)
        num_joins += sim.owner.counters.num_trunk_joins
        num_lost += sim.num_lost

    assert num_joins > 5
    assert num_lost > 0
