"""Requests leave with windows, states and open blocks, and go on at the very token."""

from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from services.control.room.resumes import Resumes, num_host_tokens
from services.executor.blocks.residency import RequestKV, SideStage
from services.executor.blocks.transfers.losses import Losses
from services.executor.step_messages import FailureCause, StepFeedback
from services.placement.blocks import STATE, side_copy_blocks
from services.placement.layer_placement import LayerPlacement
from services.placement.run.resume import ResumeWay
from tests.unit.executor.resumes import resumes_of
from tests.unit.executor.simulated_ranks import Simulation

pytestmark = pytest.mark.filterwarnings("default")

RESIDENT = LayerPlacement()
WINDOWS = (5, 9, STATE)


@dataclass
class Drill:
    """Lets requests leave and come back at random, while steps and copies are under way."""

    sim: Simulation
    leaving: dict[str, int] = field(default_factory=dict)  # tokens computed
    away: dict[str, int] = field(default_factory=dict)
    num_back: Counter[ResumeWay] = field(default_factory=Counter)
    num_put_back: int = 0

    def __post_init__(self) -> None:
        self.resumes: Resumes[RequestKV] = resumes_of(self.sim)

    def step(self) -> None:
        rng = self.sim.rng
        self.sim.settle()
        if len(self.sim.lengths) < 3 and rng.random() < 0.3:
            self.sim.admit(self.placement(), num_slots=60)
        for action in (
            self.leave,
            self.go,
            self.call_back,
            self.prepare,
            self.put_back,
            self.abort,
        ):
            action()
            self.sim.owner.check_integrity()
        new = {name: 1 if n > 24 else rng.randrange(1, 14) for name, n in self.sim.lengths.items()}
        self.sim.step({name: n for name, n in new.items() if name not in self.leaving})

    def placement(self) -> LayerPlacement:
        groups = range(self.sim.num_groups)
        some = frozenset(g for g in groups if self.sim.rng.random() < 0.5)
        return LayerPlacement(offloaded=some, num_staging=self.sim.rng.choice((1, 2)))

    def leave(self) -> None:
        running = [name for name, length in self.sim.lengths.items() if length]
        if running and self.sim.rng.random() < 0.3:
            name = self.sim.rng.choice(running)
            self.leaving[name] = self.sim.lengths[name]

    def go(self) -> None:
        for name, length in list(self.leaving.items()):
            is_drained = self.sim.processed(name) == length
            if is_drained and self.sim.transfers.may_leave(self.sim.kv(name)):
                self.away[name] = self.leaving.pop(name)
                self.sim.park(name)
                kv = self.sim.kv(name)
                assert (kv.is_parked, kv.num_side_tokens) == (True, length)

    def call_back(self) -> None:
        for name in list(self.leaving):
            if self.sim.rng.random() < 0.1 and self.sim.owner.staging.take(self.sim.kv(name)):
                del self.leaving[name]

    def prepare(self) -> None:
        for name, length in list(self.away.items()):
            record = self.sim.records[name]
            if num_host_tokens(record) is None and self.sim.rng.random() < 0.7:
                self.resumes.prepare(record, self.choose, num_slots=100, num_kept_free=0)
            elif num_host_tokens(record) is not None:
                assert num_host_tokens(record) == length
                assert record.way is not None
                self.num_back[record.way] += 1
                self.resumes.admitted(record)
                self.sim.come_back(name)
                del self.away[name]

    def choose(self, request: RequestKV) -> tuple[ResumeWay, LayerPlacement]:
        return self.sim.rng.choice([ResumeWay.LOAD, ResumeWay.HOST_RESIDENT]), self.placement()

    def put_back(self) -> None:
        for name in self.away:
            if self.sim.rng.random() < 0.1:
                self.num_put_back += self.resumes.put_back(self.sim.records[name])

    def abort(self) -> None:
        names = [*self.sim.lengths, *self.away]
        if names and self.sim.rng.random() < 0.04:
            name = self.sim.rng.choice(names)
            self.leaving.pop(name, None)
            self.away.pop(name, None)
            self.sim.records[name].way = None
            self.sim.end(name)


@pytest.mark.parametrize("max_mirrored", [1_000, 0])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_who_comes_back_reads_its_own_windows_and_states_of_the_very_token(
    depth: int, max_mirrored: int
) -> None:
    num_back, num_put_back = Counter[ResumeWay](), 0
    for seed in range(2):
        sim = Simulation(
            seed=seed,
            depth=depth,
            max_mirrored=max_mirrored,
            num_blocks=110,
            num_slots=1_500,
            windows=WINDOWS,
        )
        drill = Drill(sim)
        for _ in range(90):
            drill.step()
        for name in [*sim.lengths, *drill.away]:
            sim.end(name)
        sim.drain()
        num_back += drill.num_back
        num_put_back += drill.num_put_back

        assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1
        assert sim.owner.host.num_free == sim.num_slots

    assert min(num_back[ResumeWay.LOAD], num_back[ResumeWay.HOST_RESIDENT]) >= 3
    assert num_put_back >= 3


def grown(sim: Simulation, num_tokens: int, *, num_slots: int = 60) -> RequestKV:
    request = sim.admit(RESIDENT, num_slots=num_slots)
    sim.step({request.request_id: num_tokens})
    settled(sim)
    return request


def settled(sim: Simulation) -> None:
    """Let all copies end."""
    for _ in range(3):
        sim.step({})
        for rank in sim.ranks:
            for _ in range(50):
                rank.engine.progress()
        sim.settle()


def left(sim: Simulation, num_tokens: int) -> RequestKV:
    """Return the KV of a request that has left."""
    request = grown(sim, num_tokens)
    assert not sim.transfers.may_leave(request)
    settled(sim)
    assert sim.transfers.may_leave(request)
    sim.park(request.request_id)
    return sim.kv(request.request_id)


@pytest.mark.parametrize("num_tokens", [3, 20, 21])
def test_what_leaves_is_full_blocks_and_what_the_next_token_needs(num_tokens: int) -> None:
    sim = Simulation(seed=1, depth=0, windows=WINDOWS)

    kv = left(sim, num_tokens)

    # Windows of 5 and of 9 tokens end before token 3, 20 or 21: blocks of 4 from the first one that
    # has tokens they attend to. Four groups of full blocks, and an open block in each.
    windows = {3: 1 + 1, 20: 1 + 2, 21: 2 + 3}[num_tokens]
    num_open = 4 if num_tokens % 4 else 0
    assert len(kv.side_slots) == windows + 1 + num_open
    assert len(kv.side_slots) <= side_copy_blocks(sim.owner.geometry, num_tokens=num_tokens)
    assert sim.owner.host.num_used == 4 * (num_tokens // 4) + len(kv.side_slots)
    assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1


def test_a_step_ends_a_copy() -> None:
    sim = Simulation(seed=1, depth=0, windows=WINDOWS)
    request = grown(sim, 21)
    sim.transfers.may_leave(request)
    settled(sim)
    num_used = sim.owner.host.num_used
    num_side = len(request.side_slots)

    assert sim.owner.staging.take(request)
    sim.step({request.request_id: 1})

    assert request.side_copy is None
    assert sim.owner.host.num_used == num_used - num_side


def test_a_preemption_that_waits_for_no_copy_keeps_nothing() -> None:
    sim = Simulation(seed=1, depth=0, windows=WINDOWS)
    request = grown(sim, 20)  # all of it is on the host, but for windows and states

    sim.park(request.request_id)

    assert request.record.kv is None
    assert sim.owner.host.num_used == 0


def test_without_room_for_all_of_it_a_request_leaves_at_once_and_keeps_nothing() -> None:
    sim = Simulation(seed=1, depth=0, windows=WINDOWS, num_slots=4 * 5 + 9)  # and 10 are needed
    request = grown(sim, 21, num_slots=20)

    assert sim.transfers.may_leave(request)
    sim.park(request.request_id)

    assert request.record.kv is None
    assert sim.owner.host.num_used == 0


def test_a_full_block_that_finds_no_room_is_not_waited_for() -> None:
    sim = Simulation(seed=1, depth=0, max_mirrored=0, windows=WINDOWS, num_slots=4 * 5 + 10)
    request = grown(sim, 21, num_slots=20)
    assert not sim.transfers.may_leave(request)
    assert not sim.transfers.may_leave(request)  # nor if it is asked again before the next step
    assert sim.admit(RESIDENT, num_slots=10).mirrored  # one that does not leave

    settled(sim)

    assert request.num_host_blocks < 5
    assert sim.transfers.may_leave(request)
    sim.park(request.request_id)
    assert request.record.kv is None


def test_a_copy_that_fails_on_its_way_out_leaves_nothing_to_wait_for() -> None:
    sim = Simulation(seed=1, depth=0, windows=WINDOWS)
    request = grown(sim, 21)
    sim.transfers.may_leave(request)
    step = sim.owner.orders.next_step
    sim.transfers.plan_step({})
    num_side = len(request.side_slots)
    num_used = sim.owner.host.num_used
    failed = {(step, request.request_id, 5): FailureCause.FAILED}

    losses = Losses(sim.owner, sim.transfers)
    assert not losses.absorb(StepFeedback(step=step, saved_step=step, failed_saves=failed))

    assert request.side_copy is not None
    assert request.side_copy.stage is SideStage.FAILED
    assert sim.owner.host.num_used == num_used - num_side
    assert sim.transfers.may_leave(request)
    sim.owner.check_integrity()


def test_a_copy_that_fails_on_its_way_back_loses_the_request() -> None:
    sim = Simulation(seed=1, depth=0, windows=WINDOWS)
    kv = left(sim, 21)
    resumes_of(sim).prepare(
        kv.record, lambda _: (ResumeWay.LOAD, RESIDENT), num_slots=60, num_kept_free=0
    )
    assert kv.side_copy is not None
    restore_id = next(iter(kv.side_copy.under_way))
    transfers = sim.transfers.plan_step({})
    failed = {restore_id: FailureCause.FAILED}

    losses = Losses(sim.owner, sim.transfers)
    lost = losses.absorb(
        StepFeedback(step=transfers.step, saved_step=transfers.step, failed_restores=failed)
    )

    assert lost == {kv.request_id: FailureCause.FAILED}
    sim.owner.forget(kv)
    sim.in_flight = deque([(transfers, [])])  # the ranks are told, and let go
    sim.drain()
    assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1
    assert sim.owner.host.num_used == 0


def test_blocks_for_all_that_comes_first_are_taken_together() -> None:
    sim = Simulation(seed=1, depth=0, windows=WINDOWS)
    kv = left(sim, 21)
    resumes, num_free = resumes_of(sim), sim.pool.get_num_free_blocks()
    assert kv.side_copy is not None
    num_first = kv.side_copy.num_blocks  # 2 + 3 of windows, a state, 4 open ones

    def prepare(num_left: int) -> None:
        resumes.is_short_of_blocks = False
        offloaded = LayerPlacement(offloaded=frozenset(range(4)), num_staging=1)
        resumes.prepare(
            kv.record,
            lambda _: (ResumeWay.HOST_RESIDENT, offloaded),
            num_slots=60,
            num_kept_free=sim.pool.get_num_free_blocks() - num_left,
        )

    prepare(num_first - 1)
    assert (num_free - sim.pool.get_num_free_blocks(), resumes.is_short_of_blocks) == (0, True)
    prepare(num_first)
    assert num_free - sim.pool.get_num_free_blocks() == num_first == 10
    assert kv.num_owned == num_first
    assert not kv.is_parked
