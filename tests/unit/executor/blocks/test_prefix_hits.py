"""Requests begin with what others computed, on simulated ranks: they read nothing but their tokens.

A hit is the resume of a parked request that somebody else parked, in every way that there is.
"""

from collections import Counter

import pytest

from services.control.requests.life import State
from services.control.room.resumes import num_host_tokens
from services.executor.blocks.residency import RequestKV
from services.placement.layer_placement import ALL_RESIDENT, LayerPlacement
from services.placement.run.resume import ResumeWay
from tests.unit.executor.failing_copies import FailingSimulation, FaultRates
from tests.unit.executor.resumes import resumes_of
from tests.unit.executor.simulated_ranks import BLOCK_SIZE, Simulation, found_in, keys_of

pytestmark = pytest.mark.filterwarnings("default")

NUM_BLOCKS = 6  # of a prompt, at most


class Conversations:
    """Requests with prompts that share beginnings come, run, are parked and end at random."""

    def __init__(self, sim: Simulation, *, uncaches: bool = False) -> None:
        """`uncaches`: of some that run leading KV is not kept; others find the rest of it."""
        self.sim, self.uncaches = sim, uncaches
        self.resumes = resumes_of(sim)
        self.waiting: list[str] = []  # with KV on the host, their own or others'
        self.num_hits: Counter[ResumeWay] = Counter()
        self.num_hit_blocks = self.num_evicted = 0
        self.found: set[str] = set()  # have begun with others' blocks, and did not run yet

    def step(self) -> None:
        rng, sim = self.sim.rng, self.sim
        sim.settle()
        for name, length in sim.lengths.items() if self.uncaches else ():
            if length and rng.random() < 0.5:
                sim.uncache(name, rng.choice((0, 0, 1, 3)))
        if len(sim.lengths) + len(self.waiting) < 6 and rng.random() < 0.6:
            self.arrive()
        for action, chance in ((self.park, 0.1), (self.prepare, 0.8), (self.end, 0.25)):
            if rng.random() < chance:
                action()
                sim.owner.check_integrity()
        sim.step(
            {
                name: rng.randrange(1, 14) if length < BLOCK_SIZE * NUM_BLOCKS else 1
                for name, length in sim.lengths.items()
            }
        )
        self.waiting = [name for name in self.waiting if name not in sim.lengths]

    def arrive(self) -> None:
        sim = self.sim
        prompt = tuple(sim.rng.choice("ab") for _ in range(sim.rng.randrange(1, NUM_BLOCKS + 1)))
        record, keys, num_slots = sim.arrive(prompt), keys_of(prompt), sim.rng.choice((0, 40, 80))
        columns = sim.seek(record, keys)
        if not columns:
            sim.begin(record.request_id, self.placement(), num_slots, prompt)
            record.enter(State.RUNNING)
            return
        sim.owner.adopt_prefix(record, columns, keys)
        self.num_hit_blocks += len(columns)
        self.waiting.append(record.request_id)
        self.found.add(record.request_id)

    def placement(self) -> LayerPlacement:
        rng = self.sim.rng
        groups = frozenset(g for g in range(self.sim.num_groups) if rng.random() < 0.5)
        return LayerPlacement(offloaded=groups, num_staging=rng.choice((1, 2)))

    def park(self) -> None:
        names = [name for name, length in self.sim.lengths.items() if length]
        if names:
            name = self.sim.rng.choice(names)
            self.sim.park(name)
            self.waiting.append(name)

    def prepare(self) -> None:
        for name in list(self.waiting):
            record = self.sim.records[name]
            ready = num_host_tokens(record)
            if ready is None:
                num_slots = self.sim.rng.choice((0, 40, 80))
                self.resumes.prepare(record, self.choose, num_slots=num_slots, num_kept_free=0)
                continue
            if name in self.found:
                self.num_hits[record.way or ResumeWay.RECOMPUTE] += 1
            if record.kv is not None:
                self.sim.come_back(name)
            else:  # dropped, or cheaper to compute
                self.sim.beginnings[name] += 1
                self.sim.begin(name, ALL_RESIDENT, 0, self.sim.prompts[name])
            self.resumes.admitted(record)
            self.found.discard(name)
            self.waiting.remove(name)

    def choose(self, request: RequestKV) -> tuple[ResumeWay, LayerPlacement]:
        return self.sim.rng.choice(list(ResumeWay)), self.placement()

    def end(self) -> None:
        names = [*self.sim.lengths, *self.waiting]
        if names:
            name = self.sim.rng.choice(names)
            if name in self.waiting:
                self.waiting.remove(name)
            self.found.discard(name)
            self.sim.records[name].way = None
            self.sim.end(name)
            self.ended(name)

    def ended(self, name: str) -> None:
        """Take in that a request has ended."""

    def end_all(self) -> None:
        for name in [*self.sim.lengths, *self.waiting]:
            self.sim.end(name)
        self.waiting.clear()


def assert_all_is_given_back(sim: Simulation) -> None:
    assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1
    assert sim.owner.host.num_free == sim.num_slots


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_slots", [60, 300])
@pytest.mark.parametrize("uncaches", [False, True])
def test_whoever_begins_with_others_blocks_reads_its_own_tokens(
    depth: int, num_slots: int, uncaches: bool
) -> None:
    num_hits: Counter[ResumeWay] = Counter()
    num_blocks = num_found = 0
    for seed in range(2):
        sim = Simulation(seed=seed, depth=depth, num_slots=num_slots)
        drill = Conversations(sim, uncaches=uncaches)
        for _ in range(200):
            drill.step()
        drill.end_all()
        sim.drain()
        assert_all_is_given_back(sim)
        assert (sim.owner.uncached.num_dropped_blocks > 50) == uncaches
        num_hits.update(drill.num_hits)
        num_blocks += drill.num_hit_blocks
        num_found += sim.owner.counters.num_found_blocks

    assert all(num_hits[way] > 0 for way in ResumeWay)
    assert num_blocks > 50
    # Few columns outlive their request, and few blocks are left of one that kept little.
    assert num_found > 0 or num_slots < 300 or uncaches


KINDS = {
    "failing": FaultRates(fails=0.03),
    "hanging": FaultRates(hangs=0.01),
    "changing": FaultRates(changes=0.03),
    "all-together": FaultRates(fails=0.01, hangs=0.005, changes=0.01),
}


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_that_go_wrong_cost_whoever_shares_them_and_no_wrong_token_leaves(
    kind: str, depth: int
) -> None:
    num_hit_blocks = num_lost = 0
    for seed in range(2):
        sim = FailingSimulation(seed=seed, depth=depth, num_slots=300, rates=KINDS[kind])
        drill = Conversations(sim)
        for _ in range(150):
            drill.step()
        drill.end_all()
        sim.end_all()
        assert_all_is_given_back(sim)
        num_hit_blocks += drill.num_hit_blocks
        num_lost += sim.num_lost

    assert num_hit_blocks > 10
    assert num_lost > 0


def begun(sim: FailingSimulation, prompt: tuple[str, ...]) -> str:
    """Return a request that begins with what is cached of a prompt, and runs host-resident."""
    record, keys = sim.arrive(prompt), keys_of(prompt)
    name = record.request_id
    sim.owner.adopt_prefix(record, found_in(sim.owner.host, keys[:-1]), keys)
    sim.owner.reserve(sim.kv(name), 40)
    assert sim.owner.staging.take(sim.kv(name))
    record.enter(State.RUNNING)
    sim.come_back(name)
    return name


def settled(sim: Simulation, num_steps: int = 6) -> None:
    for _ in range(num_steps):
        sim.step({})
        for rank in sim.ranks:
            rank.engine.progress()
        sim.settle()


def test_a_corrupt_column_is_forgotten_and_costs_its_users_and_nobody_else() -> None:
    sim = FailingSimulation(seed=1, depth=0, num_ranks=1)
    for prompt in (("a", "b", "c"), ("x", "y", "z")):
        one = sim.admit(ALL_RESIDENT, prompt=prompt)
        sim.step({one.request_id: 3 * BLOCK_SIZE})
        settled(sim)
        sim.end(one.request_id)
    first, second = begun(sim, ("a", "b", "c")), begun(sim, ("a", "q", "c"))
    other = begun(sim, ("x", "y", "z"))
    (shared,) = found_in(sim.owner.host, keys_of(("a",)))
    sim.ranks[0].engine.host[shared.slots[1]] = ("changed at rest", 0, 0)

    sim.step({first: BLOCK_SIZE})

    assert sim.beginnings[first] == sim.beginnings[second] == 1
    assert sim.beginnings[other] == 0
    assert found_in(sim.owner.host, keys_of(("a",))) == []
    sim.end_all()
    assert_all_is_given_back(sim)


def test_pool_blocks_that_several_live_requests_have_are_counted() -> None:
    sim = Simulation(seed=1, depth=0)
    prompts = (("a", "b", "c"), ("a", "b", "d"), ("a", "e", "f"))
    first, second, third = [sim.admit(ALL_RESIDENT, num_slots=20, prompt=one) for one in prompts]
    for request in (first, second, third):
        sim.step({request.request_id: 3 * BLOCK_SIZE})
    settled(sim)

    # Three have "a", two "b" behind it, in each of four layer groups.
    assert sim.transfers.num_duplicate_blocks() == 4 * (2 + 1)
    sim.owner.offload(first, [0])
    settled(sim)
    # Of the first group two requests have "a" in the pool, and one has "b".
    assert sim.transfers.num_duplicate_blocks() == 3 * (2 + 1) + 1
    sim.end(second.request_id)
    assert sim.transfers.num_duplicate_blocks() == 3
    sim.end(third.request_id)
    assert sim.transfers.num_duplicate_blocks() == 0


def test_what_a_hung_copy_may_still_write_is_found_by_nobody() -> None:
    sim = FailingSimulation(seed=1, depth=0, num_ranks=1)
    one = sim.admit(ALL_RESIDENT, prompt=("a", "b"))
    sim.step({one.request_id: 2 * BLOCK_SIZE})
    settled(sim)
    sim.end(one.request_id)
    _, second = found_in(sim.owner.host, keys_of(("a", "b")))

    sim.owner.quarantine.update(frozenset(), frozenset(second.slots[:1]))

    assert len(found_in(sim.owner.host, keys_of(("a", "b")))) == 1
    sim.owner.check_integrity()


def test_what_each_step_computes_anew_is_found_by_nobody() -> None:
    sim = Simulation(seed=1, depth=0)
    prompt = ("a", "b", "c", "d")
    one = sim.admit(ALL_RESIDENT, prompt=prompt)
    sim.step({one.request_id: 4 * BLOCK_SIZE + 1})
    settled(sim)
    sim.uncache(one.request_id, 3)
    sim.step({one.request_id: 1})
    sim.uncache(one.request_id, 2)
    assert (len(one.columns), len(one.uncached), len(one.retiring)) == (4, 2, 1)

    sim.end(one.request_id)  # before a step has computed the third one for good

    uids = [column.uid for column in found_in(sim.owner.host, keys_of(prompt))]
    for group in range(sim.num_groups):
        is_left = [block is not None for block in sim.owner.blocks.find(uids, group)]
        assert is_left == [False, False, False, True]


def test_after_new_weights_nobody_begins_with_the_old_ones_kv() -> None:
    sim = Simulation(seed=1, depth=0)
    running = sim.admit(ALL_RESIDENT, prompt=("a", "b", "c"))
    sim.step({running.request_id: 2 * BLOCK_SIZE})
    settled(sim)
    assert len(found_in(sim.owner.host, keys_of(("a", "b")))) == 2

    sim.transfers.drop_all_waiting()
    sim.step({running.request_id: BLOCK_SIZE})
    settled(sim)

    assert running.num_host_blocks == 3
    assert found_in(sim.owner.host, keys_of(("a", "b", "c"))) == []
    sim.end(running.request_id)
    assert_all_is_given_back(sim)


def test_a_parked_request_makes_room_only_with_what_nobody_else_uses() -> None:
    sim = Simulation(seed=1, depth=0, num_slots=4 * 4)
    first = sim.admit(ALL_RESIDENT, num_slots=4 * 3, prompt=("a", "b", "c"))
    sim.step({first.request_id: 3 * BLOCK_SIZE})
    settled(sim)
    keys = keys_of(("a", "b", "c"))
    other = sim.arrive(("a", "b", "c"))
    sim.owner.adopt_prefix(other, found_in(sim.owner.host, keys[:2]), keys)
    sim.park(first.request_id)

    assert not sim.owner.drop_parked(4 * 2, but=other.kv)  # one block is its own
    assert sim.owner.drop_parked(4, but=other.kv)
    assert sim.owner.host.num_unpromised == 4 * 2


def test_all_that_the_pool_still_has_of_a_request_is_found_before_it_takes_other_blocks() -> None:
    sim = Simulation(seed=1, depth=0, num_slots=300)
    prompt = ("a", "b", "c", "d")
    for one in (sim.admit(ALL_RESIDENT, prompt=prompt), sim.admit(ALL_RESIDENT, prompt=("x", "y"))):
        sim.step({one.request_id: len(sim.prompts[one.request_id]) * BLOCK_SIZE})
        settled(sim)
        sim.end(one.request_id)
    # Of the sixteen blocks that the first has left, six are gone; behind the rest are the other's.
    sim.pool.get_new_blocks(sim.pool.get_num_free_blocks() - 10 - 8)
    counters = sim.owner.counters
    before = counters.num_found_blocks

    record, keys = sim.arrive(prompt), keys_of(prompt)
    sim.owner.adopt_prefix(record, found_in(sim.owner.host, keys), keys)
    resumes_of(sim).prepare(
        record, lambda _: (ResumeWay.LOAD, ALL_RESIDENT), num_slots=40, num_kept_free=0
    )

    assert counters.num_found_blocks - before == 10
    assert counters.num_loaded_blocks == 6
