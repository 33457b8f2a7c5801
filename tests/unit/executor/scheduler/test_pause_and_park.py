"""Requests that do not run lose blocks, come back, and read nothing but their own KV."""

import random
from collections import Counter

import pytest

from services.control.room.resumes import num_host_tokens
from services.executor.blocks.residency import RequestKV
from services.placement.layer_placement import LayerPlacement
from services.placement.run.resume import ResumeWay
from tests.unit.executor.resumes import resumes_of
from tests.unit.executor.simulated_ranks import BLOCK_SIZE, Simulation
from tests.unit.records import make_record

pytestmark = pytest.mark.filterwarnings("default")

RESIDENT = LayerPlacement()


class Drill:
    """Pauses, parks and brings back requests at random, in every way."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.resumes = resumes_of(sim)
        self.paused: dict[str, int] = {}  # tokens computed
        self.parked: list[str] = []
        self.num_pauses = 0
        self.num_reclaims = 0

    def step(self) -> None:
        rng = self.sim.rng
        self.sim.settle()
        if len(self.sim.lengths) < 4 and rng.random() < 0.3:
            self.sim.admit(self.placement(), num_slots=rng.choice((0, 80, 200)))
        for action in (self.pause, self.reclaim, self.wake, self.park, self.prepare, self.abort):
            if rng.random() < (0.7 if action == self.prepare else 0.25):
                action()
                self.sim.owner.check_integrity()
        self.sim.step(
            {
                name: rng.randrange(1, 14) if length < 24 else 1
                for name, length in self.sim.lengths.items()
            }
        )

    def placement(self) -> LayerPlacement:
        groups = range(self.sim.num_groups)
        return LayerPlacement(
            offloaded=frozenset(g for g in groups if self.sim.rng.random() < 0.5),
            num_staging=self.sim.rng.choice((1, 2)),
        )

    def pause(self) -> None:
        running = [name for name, length in self.sim.lengths.items() if length]
        if running:
            name = self.sim.rng.choice(running)
            self.paused[name] = self.sim.lengths.pop(name)
            self.num_pauses += 1

    def reclaim(self) -> None:
        for name in self.paused:
            request = self.sim.kv(name)
            if request.mirrored:
                groups = range(self.sim.num_groups)
                some = [g for g in groups if self.sim.rng.random() < 0.4]
                self.sim.sleep(name, some)
                self.num_reclaims += len(some)

    def wake(self) -> None:
        for name, length in list(self.paused.items()):
            if self.sim.owner.staging.take(self.sim.kv(name)):
                self.sim.lengths[name] = length
                del self.paused[name]

    def park(self) -> None:
        if self.paused:
            name = self.sim.rng.choice(list(self.paused))
            self.sim.lengths[name] = self.paused.pop(name)
            self.sim.park(name)
            self.parked.append(name)

    def prepare(self) -> None:
        for name in list(self.parked):
            record = self.sim.records[name]
            ready = num_host_tokens(record)
            if ready is None:
                self.resumes.prepare(
                    record, self.choose, num_slots=self.sim.rng.choice((0, 100)), num_kept_free=0
                )
            elif ready > 0:
                self.resumes.admitted(record)
                self.parked.remove(name)
                self.sim.come_back(name)
            else:  # nothing is on the host any more: all of it is recomputed
                self.parked.remove(name)
                self.sim.owner.adopt(self.sim.owner.draft(record, RESIDENT, num_slots=0))
                self.sim.lengths[name] = 0
                self.resumes.admitted(record)

    def choose(self, request: RequestKV) -> tuple[ResumeWay, LayerPlacement]:
        way = self.sim.rng.choice(list(ResumeWay))
        return way, self.placement()

    def abort(self) -> None:
        names = [*self.sim.lengths, *self.paused, *self.parked]
        if names and self.sim.rng.random() < 0.2:
            name = self.sim.rng.choice(names)
            self.paused.pop(name, None)
            if name in self.parked:
                self.parked.remove(name)
            self.sim.records[name].way = None
            self.sim.end(name)


@pytest.mark.parametrize("max_mirrored", [1_000, 0, 3])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_random_pauses_and_parks_never_show_a_layer_anything_but_its_own_kv(
    depth: int, max_mirrored: int
) -> None:
    num_resumes: Counter[ResumeWay] = Counter()
    num_pauses = num_reclaims = 0
    for seed in range(3):
        sim = Simulation(seed=seed, depth=depth, max_mirrored=max_mirrored, num_slots=300)
        drill = Drill(sim)
        for _ in range(150):
            drill.step()
        for name in [*sim.lengths, *drill.paused, *drill.parked]:
            sim.end(name)
        sim.drain()
        num_resumes.update({way: sim.owner.counters.num_resumes(way) for way in ResumeWay})
        num_pauses += drill.num_pauses
        num_reclaims += drill.num_reclaims

        assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1
        assert sim.owner.host.num_free == sim.num_slots

    assert min(num_pauses, num_reclaims) > 0
    if max_mirrored:  # without write-through, few requests have anything to come back with
        assert all(num_resumes[way] > 0 for way in ResumeWay)


def settled(sim: Simulation) -> None:
    """Let all copies end."""
    for _ in range(3):
        sim.step({})
        for rank in sim.ranks:
            for _ in range(50):
                rank.engine.progress()
        sim.settle()


def grown(sim: Simulation, num_tokens: int, *, num_slots: int = 60) -> RequestKV:
    request = sim.admit(RESIDENT, num_slots=num_slots)
    sim.step({request.request_id: num_tokens})
    settled(sim)
    return request


def test_a_group_whose_copies_are_complete_leaves_at_once_and_without_a_transfer() -> None:
    sim = Simulation(seed=1, depth=0)
    request = grown(sim, 21)  # 5 full blocks and an open one in each of 4 groups
    num_free = sim.pool.get_num_free_blocks()

    sim.sleep(request.request_id, [2])

    assert sim.pool.get_num_free_blocks() == num_free + 5
    assert not sim.transfers.write_through.is_busy


def test_a_parked_request_owns_no_block_and_keeps_its_full_blocks_on_the_host() -> None:
    sim = Simulation(seed=1, depth=0)
    request = grown(sim, 21)

    num_tokens = sim.park(request.request_id)

    assert num_tokens == 20
    assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1
    assert sim.owner.host.num_used == 4 * 5


def test_what_is_not_yet_copied_is_forgotten_by_a_preemption() -> None:
    sim = Simulation(seed=1, depth=0, max_mirrored=0)
    request = grown(sim, 21)

    assert sim.park(request.request_id) == 0
    assert request.record.kv is None
    assert sim.owner.host.num_used == 0


def test_copies_of_the_old_request_that_complete_late_do_not_count_for_the_parked_one() -> None:
    sim = Simulation(seed=1, depth=1)
    request = grown(sim, 21)
    sim.step({request.request_id: 9})  # fills two more blocks, whose copies are under way

    num_tokens = sim.park(request.request_id)
    settled(sim)

    assert num_tokens == 20
    assert sim.kv(request.request_id).num_host_blocks == 5


def test_loads_of_one_request_begin_while_the_blocks_of_another_still_drain() -> None:
    sim = Simulation(seed=3, depth=1, num_blocks=32)
    first = grown(sim, 24)  # 24 of 31 blocks
    sim.park(first.request_id)
    second = sim.admit(RESIDENT)
    sim.step({second.request_id: 24})  # its copies are under way
    sim.settle()
    resumes = resumes_of(sim)

    def load(request: RequestKV) -> tuple[ResumeWay, LayerPlacement]:
        return ResumeWay.LOAD, RESIDENT

    sim.sleep(second.request_id, range(4))
    resumes.prepare(first.record, load, num_slots=24, num_kept_free=0)
    loading = [g.restore for g in sim.kv(first.request_id).groups if g.restore]

    assert loading, "not a single load has begun"
    assert any(group.own for group in second.groups)  # not all of it has gone
    num_targets = sum(len(restore.targets) for restore in loading)
    assert 0 < num_targets < 24
    assert resumes.is_short_of_blocks

    for _ in range(40):
        sim.settle()
        resumes.prepare(first.record, load, num_slots=24, num_kept_free=0)
        sim.step({})
        for rank in sim.ranks:
            rank.engine.progress()
    assert not any(group.own for group in second.groups)
    assert num_host_tokens(first.record) == 24


def test_a_parked_request_does_not_wake_up_on_blocks_that_are_kept_for_running_ones() -> None:
    sim = Simulation(seed=1, depth=0)
    parked = grown(sim, 21)
    sim.park(parked.request_id)
    resumes = resumes_of(sim)
    offloaded = LayerPlacement(offloaded=frozenset(range(4)), num_staging=1)

    def leave_on_host(request: RequestKV) -> tuple[ResumeWay, LayerPlacement]:
        return ResumeWay.HOST_RESIDENT, offloaded

    def prepare(num_left: int) -> int | None:
        num_kept = sim.pool.get_num_free_blocks() - num_left
        resumes.is_short_of_blocks = False
        resumes.prepare(parked.record, leave_on_host, num_slots=24, num_kept_free=num_kept)
        return num_host_tokens(parked.record)

    assert prepare(4) is None  # one staging buffer of 5 blocks
    assert resumes.is_short_of_blocks
    assert prepare(5) == 20
    assert not resumes.is_short_of_blocks


def test_a_parked_request_gives_way_to_one_that_needs_room_on_the_host() -> None:
    sim = Simulation(seed=1, depth=0, num_slots=24)
    parked = grown(sim, 21, num_slots=20)
    sim.park(parked.request_id)  # 20 of 24 slots

    request = sim.admit(RESIDENT, num_slots=8)

    assert request.mirrored
    assert parked.record.kv is None
    assert sim.owner.counters.num_dropped_copies == 1


def test_parked_requests_stay_if_dropping_them_would_not_make_enough_room() -> None:
    sim = Simulation(seed=1, depth=0, num_slots=24)
    parked = grown(sim, 21, num_slots=20)
    sim.park(parked.request_id)

    request = sim.admit(RESIDENT, num_slots=25)

    assert not request.mirrored
    assert parked.record.kv is not None


def test_the_request_with_the_largest_deposit_is_mirrored_first_and_then_the_last_one() -> None:
    sim = Simulation(seed=1, depth=0, max_mirrored=0, num_blocks=200, num_slots=400)
    requests = [grown(sim, 2 * BLOCK_SIZE) for _ in range(3)]
    write_through = sim.transfers.write_through

    assert write_through.by_likelihood(requests) == requests[::-1]
    requests[0].record.num_deposited_tokens, requests[1].record.num_deposited_tokens = 7, 3
    assert write_through.by_likelihood(requests) == [requests[0], requests[1], requests[2]]

    sim.max_mirrored = 8  # one request's worth
    sim.step({})
    settled_once = [request.groups[3].num_saves_sent for request in requests]
    assert settled_once == [2, 0, 0]


def test_a_row_that_came_back_shows_every_block_where_it_was() -> None:
    sim = Simulation(seed=9, depth=0)
    rng = random.Random(9)
    request = grown(sim, 21)
    for _ in range(10):
        sim.lengths.pop(request.request_id)
        sim.sleep(request.request_id, [g for g in range(4) if rng.random() < 0.5])
        settled(sim)
        assert sim.owner.staging.take(request)
        sim.lengths[request.request_id] = request.num_tokens
        sim.step({request.request_id: 1})  # the ranks check what attention reads
        settled(sim)


def load(request: RequestKV) -> tuple[ResumeWay, LayerPlacement]:
    return ResumeWay.LOAD, RESIDENT


def test_who_comes_back_gets_room_to_grow_into_at_the_cost_of_those_who_stay_parked() -> None:
    sim = Simulation(seed=1, depth=0, num_slots=48)
    first, second = grown(sim, 21, num_slots=20), grown(sim, 25, num_slots=24)
    sim.park(first.request_id)  # 20 of 48 slots
    sim.park(second.request_id)  # 24

    resumes = resumes_of(sim)
    resumes.prepare(first.record, load, num_slots=28, num_kept_free=0)

    assert first.record.kv is not None
    assert second.record.kv is None
    assert sim.owner.host.can_take(sim.kv(first.request_id).promise, 8)
    assert sim.owner.host.num_unpromised == 20


def test_who_would_come_back_without_room_to_grow_into_is_recomputed() -> None:
    sim = Simulation(seed=1, depth=0, num_slots=24)
    request = grown(sim, 21, num_slots=20)
    sim.park(request.request_id)

    resumes = resumes_of(sim)
    resumes.prepare(request.record, load, num_slots=28, num_kept_free=0)

    assert num_host_tokens(request.record) == 0
    assert sim.owner.host.num_free == 24


def test_a_draft_that_is_not_admitted_costs_nobody_its_host_copies() -> None:
    sim = Simulation(seed=1, depth=0, num_slots=24)
    parked = grown(sim, 21, num_slots=20)
    sim.park(parked.request_id)  # 20 of 24 slots

    offloaded = LayerPlacement(offloaded=frozenset(range(4)))
    draft = sim.owner.draft(make_record("never"), offloaded, num_slots=8)
    assert draft.mirrored
    num_new = sim.owner.growth.num_new_blocks(draft, num_tokens=8, num_accepted=8)
    sim.owner.check_integrity(drafts=[draft])
    sim.owner.discard(draft)

    assert parked.record.kv is not None
    assert sim.owner.counters.num_dropped_copies == 0
    assert num_new == 2  # as many as it would take: a staging block per position
    assert sim.owner.host.num_unpromised == 4


def test_a_recompute_that_waits_for_room_counts_once_it_runs() -> None:
    sim = Simulation(seed=1, depth=0)
    request = grown(sim, 21)
    sim.park(request.request_id)
    resumes = resumes_of(sim)

    def recompute(kv: RequestKV) -> tuple[ResumeWay, LayerPlacement]:
        return ResumeWay.RECOMPUTE, RESIDENT

    for _ in range(3):
        resumes.prepare(request.record, recompute, num_slots=24, num_kept_free=0)
        assert num_host_tokens(request.record) == 0
    resumes.admitted(request.record)

    assert sim.owner.counters.num_resumes_recompute == 1
