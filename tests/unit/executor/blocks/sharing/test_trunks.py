"""Requests that begin alike share blocks, on simulated ranks: each reads its own tokens only."""

from collections import Counter
from dataclasses import dataclass, field

import pytest

from services.control.prefixes.prefix_cache import num_complete
from services.control.prefixes.shared_prefixes import Stretch
from services.control.requests.life import State
from services.control.room.resumes import num_host_tokens
from services.executor.blocks.holder import Holder
from services.executor.blocks.residency import RequestKV, Trunk
from services.executor.blocks.sharing.trunks import Trunks
from services.executor.blocks.transfers.losses import Losses
from services.executor.step_messages import FailureCause, StepFeedback
from services.placement.layer_placement import ALL_RESIDENT, LayerPlacement
from services.placement.run.resume import ResumeWay
from tests.unit.executor.blocks.test_capacity_guard import make_guard, needs_of
from tests.unit.executor.blocks.test_prefix_hits import (
    KINDS,
    Conversations,
    assert_all_is_given_back,
    settled,
)
from tests.unit.executor.failing_copies import FailingSimulation, FaultRates
from tests.unit.executor.resumes import resumes_of
from tests.unit.executor.simulated_ranks import BLOCK_SIZE, Simulation, found_in, keys_of

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
    num_early: int = 0  # trunks that were not on the host yet, over steps
    num_splits: Counter[str] = field(default_factory=Counter)  # by what the holder was in
    outlived: set[Trunk] = field(default_factory=set)  # were used when their first user had left
    first_users: dict[Trunk, RequestKV] = field(default_factory=dict)


class Agents(Conversations):
    """Conversations whose trunks are moved about, too."""

    share_moved = 0.2  # of holders, per step

    def __init__(self, sim: Simulation, seen: Seen) -> None:
        super().__init__(sim)
        self.trunks, self.seen = sharing(sim), seen
        self.split, self.trunks.splits.split = self.trunks.splits.split, self.on_split

    def on_split(self, holder: Holder, end: int) -> Trunk:
        is_loading = any(group.restore and group.restore.under_way for group in holder.groups)
        self.seen.num_splits["offloaded"] += bool(holder.offloaded)
        self.seen.num_splits["loading"] += is_loading
        return self.split(holder, end)

    def step(self) -> None:
        rng, sim = self.sim.rng, self.sim
        sim.max_mirrored = rng.choice((0, 0, 0, 0, 0, 2, 1_000))  # of what resident groups have
        for holder in list(sim.owner.holders()):
            if holder.mirrored and not holder.asleep and rng.random() < self.share_moved:
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
        self.seen.num_early += sum(not trunk.mirrored for trunk in self.trunks.all)
        for trunk in self.trunks.all:
            first = self.seen.first_users.setdefault(trunk, next(iter(trunk.users)))
            if first not in trunk.users:
                self.seen.outlived.add(trunk)

    def placement(self) -> LayerPlacement:
        return ALL_RESIDENT if self.sim.rng.random() < 0.7 else super().placement()

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
        for _ in range(130):
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
    assert seen.num_early > 1


class Movers(Agents):
    """Agents of which nearly everything is on its way, one way or the other."""

    share_moved = 0.8


def test_holders_are_split_wherever_they_are_and_trunks_outlive_their_first_users() -> None:
    seen = Seen()
    for seed in range(3):
        sim = Simulation(seed=seed, depth=2 + seed % 2, num_slots=300, num_blocks=110)
        drill = Movers(sim, seen)
        for _ in range(160):
            drill.step()
        drill.end_all()
        sim.drain()
        assert_all_is_given_back(sim)

    assert seen.num_splits["offloaded"] >= 15
    assert seen.num_splits["loading"] >= 15
    assert len(seen.outlived) >= 15


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_that_goes_wrong_costs_all_users_of_a_trunk(kind: str, depth: int) -> None:
    num_joins, num_lost, seen = 0, 0, Seen()
    for seed in range(2):
        sim = FailingSimulation(seed=seed, depth=depth, num_slots=300, rates=KINDS[kind])
        drill = Agents(sim, seen)
        for _ in range(200):
            drill.step()
        drill.end_all()
        sim.end_all()
        assert_all_is_given_back(sim)
        num_joins += sim.owner.counters.num_trunk_joins
        num_lost += sim.num_lost

    assert num_joins > 5
    assert num_lost > 0
    assert seen.num_early > 3


# -- one case at a time --------------------------------------------------------------------------

PROMPT = tuple("abcdef")


def first_of(sim: Simulation, prompt: tuple[str, ...] = PROMPT) -> RequestKV:
    """Return a request that runs, and whose prompt is on the host."""
    first = sim.admit(ALL_RESIDENT, prompt=prompt)
    sim.step({first.request_id: len(prompt) * BLOCK_SIZE + 1})
    settled(sim)
    return first


def follower(sim: Simulation, prompt: tuple[str, ...] = PROMPT) -> RequestKV:
    """Return a request that waits, and shares what others have of its prompt but its last block."""
    record, keys = sim.arrive(prompt), keys_of(prompt)
    sim.owner.adopt_prefix(record, sim.seek(record, keys), keys)
    kv = sim.kv(record.request_id)
    sim.owner.trunks.join(kv)
    sim.owner.check_integrity()
    return kv


def test_all_users_of_a_trunk_load_it_once() -> None:
    sim = Simulation(seed=1, depth=0, num_ranks=1, num_blocks=100)
    sharing(sim)
    users = [first_of(sim), *(follower(sim) for _ in range(3))]
    (trunk,) = sim.owner.trunks.all
    sim.owner.offload(trunk, range(sim.num_groups))
    for user in users[1:]:
        user.record.enter(State.LOADING)
        for index in range(sim.num_groups):
            sim.owner.restores.begin_in_parts(user, index)
        assert sim.owner.trunks.wake(user)
        user.record.enter(State.READY)
        user.record.enter(State.RUNNING)
        sim.come_back(user.request_id)
    before = sim.ranks[0].runner.num_loads

    sim.step({user.request_id: 1 for user in users})

    assert sim.ranks[0].runner.num_loads - before == sim.num_groups
    assert len(trunk.users) == 4


def test_where_a_row_is_cut_behind_its_staging_the_ranks_know() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100)
    sharing(sim)
    first = sim.admit(LayerPlacement(offloaded=frozenset({0, 1}), num_staging=2), prompt=PROMPT)
    sim.step({first.request_id: 2 * BLOCK_SIZE})
    settled(sim)
    for index in (0, 1):
        assert sim.owner.restores.begin(first, index)
    for _ in range(3):  # with both groups on their way, what is filled is sealed in none
        sim.step({first.request_id: BLOCK_SIZE})
        sim.transfers.absorb(StepFeedback(step=99, saved_step=99))
    sim.step({first.request_id: 2})
    assert first.staging_length < len(first.columns)
    assert first.restoring == [0, 1]

    follower(sim)
    assert not first.restoring
    for _ in range(4):
        sim.settle()
        sim.step({first.request_id: BLOCK_SIZE})
    sim.drain()


def begun(sim: Simulation, prompt: tuple[str, ...] = PROMPT) -> RequestKV:
    """Return a request that began with what was cached of its prompt, and has computed the rest."""
    record, keys, resumes = sim.arrive(prompt), keys_of(prompt), resumes_of(sim)
    sim.owner.adopt_prefix(record, sim.seek(record, keys), keys)
    load = (ResumeWay.LOAD, ALL_RESIDENT)
    while num_host_tokens(record) is None:
        resumes.prepare(record, lambda kv: load, num_slots=40, num_kept_free=0)
        settled(sim, num_steps=1)
    resumes.admitted(record)
    kv = sim.kv(record.request_id)
    sim.come_back(record.request_id)
    sim.step({record.request_id: len(prompt) * BLOCK_SIZE + 1 - kv.num_tokens})
    settled(sim)
    return kv


def test_what_is_computed_again_behind_a_trunk_is_other_kv() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100)
    sharing(sim)
    first_of(sim, PROMPT[:4])
    second = begun(sim)
    name, uid = second.request_id, second.uid(4)
    sim.park(name)
    parked = sim.kv(name)
    sim.owner.trunks.join(parked)
    assert 0 < parked.num_shared < len(parked.columns)

    sim.owner.keep(parked, parked.num_shared)

    assert len(parked.columns) == parked.num_shared
    assert parked.uid(4) != uid
    sim.owner.check_integrity()


def test_a_trunk_goes_where_a_plan_has_it_and_comes_back() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100)
    sharing(sim)
    users, guard = [first_of(sim), begun(sim)], make_guard(sim)
    (trunk,) = sim.owner.trunks.all
    trunk.floor = LayerPlacement(offloaded=frozenset({1, 2}))

    guard.adjust(needs_of(sim), [])

    assert trunk.offloaded == [1, 2]
    assert not any(user.offloaded for user in users)
    trunk.floor = None
    guard.adjust(needs_of(sim), [])
    settled(sim)
    assert not trunk.offloaded
    sim.owner.check_integrity()


def test_what_a_plan_says_of_a_request_goes_on_for_the_part_that_others_share() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100)
    sharing(sim)
    first = first_of(sim)
    first.record.floor = LayerPlacement(offloaded=frozenset({1}))

    follower(sim, PROMPT[:5])
    follower(sim, PROMPT[:3])

    assert len(first.trunks) == 2
    assert all(trunk.floor is first.record.floor for trunk in first.trunks)


def test_who_waits_behind_a_trunk_loads_nothing_in_a_step() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100)
    sharing(sim)
    first_of(sim)
    assert follower(sim).num_shared

    assert sim.transfers.num_step_load_blocks() == 0


def test_who_has_a_trunk_and_nothing_else_is_put_back() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100)
    sharing(sim)
    first = first_of(sim)
    kv = follower(sim)
    kv.record.enter(State.LOADING)

    assert resumes_of(sim).put_back(kv.record)

    assert not kv.trunks
    assert kv.first == 0
    assert list(sim.owner.trunks.all) == first.trunks
    sim.owner.check_integrity()


def test_after_new_weights_what_is_shared_counts_once_and_nobody_joins() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100)
    trunks = sharing(sim)
    first, second = first_of(sim), follower(sim)
    assert trunks.stretches(first)[0] == trunks.stretches(second)[0]

    sim.owner.forget_prefixes()

    assert (
        trunks.stretches(first)
        == trunks.stretches(second)
        == [Stretch(first.trunks[0].name, len(PROMPT) - 1)]
    )


def test_kinds_that_have_a_short_beginning_in_common_are_shared_side_by_side() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100)
    sim.owner.trunks.min_tokens = 3 * BLOCK_SIZE
    kinds = [("head", *"abcd"), ("head", *"wxyz")]
    first_of(sim, kinds[0])
    begun(sim, kinds[1])

    assert [follower(sim, kind).num_shared for kind in kinds] == [4, 4]


def test_what_a_split_leaves_may_be_shorter_than_what_is_shared() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100)
    sim.owner.trunks.min_tokens = 3 * BLOCK_SIZE
    first_of(sim)
    assert follower(sim).num_shared == 5

    assert follower(sim, (*PROMPT[:3], *"xyz")).num_shared == 3

    assert sorted((trunk.first, trunk.end) for trunk in sim.owner.trunks.all) == [(0, 3), (3, 5)]


# -- before it is on the host --------------------------------------------------------------------


def filling(sim: Simulation) -> RequestKV:
    """Return a request whose prompt a step has filled, and of which nothing is copied."""
    sim.max_mirrored = 0
    first = sim.admit(ALL_RESIDENT, prompt=PROMPT)
    sim.step({first.request_id: len(PROMPT) * BLOCK_SIZE + 1})
    assert first.num_host_blocks == 0
    return first


def run(sim: Simulation, kv: RequestKV) -> None:
    """Let a request run that shares all that it has."""
    kv.record.enter(State.LOADING)
    assert sim.owner.trunks.wake(kv)
    kv.record.enter(State.READY)
    kv.record.enter(State.RUNNING)
    sim.come_back(kv.request_id)


def test_what_a_step_has_filled_is_shared_before_it_is_on_the_host() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100)
    sharing(sim)
    first = filling(sim)
    second = follower(sim)
    (trunk,) = first.trunks
    assert second.num_shared == len(PROMPT) - 1
    assert not trunk.mirrored
    run(sim, second)
    sim.step({one.request_id: 2 * BLOCK_SIZE for one in (first, second)})

    sim.max_mirrored = 1_000
    settled(sim)

    assert trunk.mirrored
    assert second.num_host_blocks == second.num_full_blocks
    sim.owner.offload(trunk, range(sim.num_groups))
    sim.step({one.request_id: 1 for one in (first, second)})


def test_who_leaves_before_it_is_on_the_host_keeps_what_is() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100)
    sharing(sim)
    first = filling(sim)
    second = follower(sim)
    run(sim, second)
    sim.step({second.request_id: 2 * BLOCK_SIZE})
    trunk, sim.max_mirrored = first.trunks[0], 1
    while not trunk.num_copied_blocks:
        settled(sim, num_steps=1)
    sim.max_mirrored = 0
    settled(sim)
    assert 0 < trunk.num_copied_blocks < trunk.end

    num_kept = sim.park(second.request_id) // BLOCK_SIZE

    assert num_kept == trunk.num_copied_blocks
    sim.end(first.request_id)
    assert not sim.owner.trunks.all
    sim.owner.check_integrity()
    assert num_complete(found_in(sim.owner.host, keys_of(PROMPT))) == num_kept


def test_copies_go_on_when_who_began_them_has_ended() -> None:
    sim = Simulation(seed=1, depth=0, num_ranks=1, num_blocks=100)
    sharing(sim)
    first = filling(sim)
    sim.max_mirrored = 1_000
    sim.ranks[0].engine.progress = lambda: None  # type: ignore[method-assign]
    sim.step({first.request_id: 1})  # orders them
    second = follower(sim)
    run(sim, second)
    sim.end(first.request_id)
    sim.step({second.request_id: 2 * BLOCK_SIZE})
    del sim.ranks[0].engine.progress

    settled(sim, num_steps=12)

    (trunk,) = second.trunks
    assert trunk.mirrored
    sim.owner.offload(trunk, range(sim.num_groups))
    sim.step({second.request_id: 1})  # reads what the copies brought


def test_a_request_that_is_lost_takes_those_with_it_who_share_what_it_has_not_copied() -> None:
    sim = FailingSimulation(seed=1, depth=0, num_ranks=1, num_slots=300, rates=FaultRates())
    sharing(sim)
    first = filling(sim)
    second = follower(sim)

    lost = Losses(sim.owner, sim.transfers).absorb(
        StepFeedback(step=1, saved_step=0, lost_requests={first.request_id: FailureCause.FAILED})
    )

    assert set(lost) == {first.request_id, second.request_id}


def test_who_comes_back_begins_with_what_is_cached_and_not_with_a_twin() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100)
    sharing(sim)
    twins = [sim.admit(ALL_RESIDENT, prompt=PROMPT) for _ in range(2)]
    for twin in twins:
        record, length = twin.record, len(PROMPT) * BLOCK_SIZE + 1
        sim.step({twin.request_id: length})
        sim.owner.host.find(record.prefix, keys_of(PROMPT), len(PROMPT) - 1)
    settled(sim)
    first, second = (sim.kv(twin.request_id) for twin in twins)
    assert not {*first.columns}.intersection(second.columns)
    sim.park(second.request_id)
    parked = sim.kv(second.request_id)

    sim.owner.trunks.join(parked)

    assert parked.num_shared == len(PROMPT) - 1
    assert parked.columns[:-1] == first.columns[:-1]
    assert parked.columns[-1] is not first.columns[-1]
    sim.owner.check_integrity()
    run(sim, parked)
    sim.step({one.request_id: 1 for one in (first, parked)})
