"""Trunks: the simulator's counts beside the executor's blocks, through the same histories."""

import random
from collections import Counter

from vllm.v1.core.block_pool import BlockPool

from services.control.kv import holders_of
from services.control.requests.life import State
from services.control.requests.request_record import RequestRecord
from services.executor.blocks.block_owner import BlockOwner
from services.executor.blocks.holder import Holder
from services.executor.blocks.host_pool import HostPool
from services.executor.blocks.residency import RequestKV
from services.executor.blocks.transfers.moves import BlockMoves
from services.executor.blocks.transfers.transfers import Transfers
from services.placement.blocks import BlockGeometry, Residency, num_request_blocks
from services.placement.layer_placement import ALL_RESIDENT
from services.placement.types import EngineShape, RequestId
from simulator.device.copies import Lane
from simulator.engine.scheduler import Scheduler
from simulator.memory.kv import KVState
from simulator.memory.requests import SimulatedRequest, live_request
from simulator.workload import HASHED_TOKENS, ArrivingRequest
from tests.unit.records import make_record

SHAPE = EngineShape(
    num_layers=4,
    layers_per_group=1,
    block_size=128,
    num_blocks=10_000,
    block_bytes=1_000,
    max_num_seqs=64,
    max_num_batched_tokens=64,
    num_host_blocks=10_000,
    max_model_len=10_000,
)
GEOMETRY = BlockGeometry(num_groups=SHAPE.num_groups, block_size=SHAPE.block_size)
ALL_GROUPS = range(SHAPE.num_groups)
NUM_SLOTS = 200  # of each request: more than it ever takes
# Pieces of prompts, 4 blocks each: a tree.
PROMPTS = [(1, 2, 3), (1, 2, 3), (1, 2, 4), (1, 5), (6, 7, 8, 9)]


def no_rates() -> None:
    """Say nothing: the scheduler is not asked to choose."""


class Pair:
    """The same requests in the executor's terms and in the simulator's."""

    def __init__(self) -> None:
        pool = BlockPool(SHAPE.num_blocks + 1, enable_caching=False, hash_block_size=128)
        self.records: dict[str, RequestRecord[RequestKV]] = {}
        self.owner = BlockOwner(pool, HostPool(SHAPE.num_host_blocks), GEOMETRY, self.records)
        transfers = Transfers(self.owner, num_ranks=1, write_budget=lambda under_way: 0)
        self.real = BlockMoves(self.owner, transfers)
        lanes = Lane(bytes_per_s=1.0), Lane(bytes_per_s=1.0)
        self.scheduler = Scheduler(SHAPE, *lanes, vllm=None, rates=no_rates)  # type: ignore[arg-type]
        self.ours = self.scheduler.moves
        self.num_requests = 0

    # -- one request ---------------------------------------------------------------------------

    def real_kv(self, request: SimulatedRequest) -> RequestKV:
        kv = self.records[request.request_id].kv
        assert kv is not None
        return kv

    def kvs(self, request: SimulatedRequest) -> tuple[KVState, RequestKV]:
        return request.kv, self.real_kv(request)

    def enter(self, request: SimulatedRequest, *states: State) -> None:
        for state in states:
            request.record.enter(state)
            self.records[request.request_id].enter(state)

    def arrive(self, which: int, num_own: int) -> None:
        """Let a request run that begins with what there is of a prompt."""
        self.num_requests += 1
        name, pieces = f"r{self.num_requests}", PROMPTS[which]
        spec = ArrivingRequest(
            request_id=RequestId(name),
            arrival_s=0.0,
            num_prompt_tokens=HASHED_TOKENS * len(pieces) + num_own,
            num_output_tokens=1_000,
            prompt_hashes=pieces,
        )
        request = live_request(spec, GEOMETRY)
        self.scheduler.add(request)
        self.records[name] = make_record(name)
        columns = self.scheduler.line.engine.cached_prefix(request)
        keys = list(spec.block_keys(SHAPE.block_size))
        found = self.owner.host.cache.find(keys[: (spec.num_prompt_tokens - 1) // 128])
        assert [one.key for one in columns] == [one.key for one in found]
        if columns:
            self.scheduler.line.engine.adopt_prefix(request, columns)
            self.owner.adopt_prefix(self.records[name], found, keys)
            self.come(request, whole=bool(num_own % 2))
        else:
            self.begin(request, keys)
        self.grow(request, spec.num_prompt_tokens)

    def begin(self, request: SimulatedRequest, keys: list) -> None:
        request.record.kv = KVState(request_id=request.request_id, geometry=GEOMETRY, mirrored=True)
        assert self.scheduler.host.set_owned(request.request_id, NUM_SLOTS)
        record = self.records[request.request_id]
        self.owner.adopt(self.owner.draft(record, ALL_RESIDENT, num_slots=NUM_SLOTS, keys=keys))
        self.run(request)

    def come(self, request: SimulatedRequest, *, whole: bool) -> None:
        """Bring a request back, with all groups or with none, beside whom it shares with."""
        self.on_its_way(request, whole=whole)
        self.arrived()
        loadings = [moves.load_on(kv, 5_000) for moves, kv in self.sides(request)]
        assert all(loading.is_complete for loading in loadings)
        assert self.ours.num_to_wake(request.kv) == self.real.num_to_wake(self.real_kv(request))
        assert all([moves.wake(kv) for moves, kv in self.sides(request)])
        self.enter(request, State.READY)
        self.run(request)

    def on_its_way(self, request: SimulatedRequest, *, whole: bool) -> None:
        groups = ALL_GROUPS if whole else ()
        self.enter(request, State.LOADING)
        for moves, kv in self.sides(request):
            moves.share(kv)
            assert moves.reserve(kv, NUM_SLOTS)
            moves.begin_load(kv, groups, num_buffers=2)
            moves.load_on(kv, 5_000)
        self.check()

    def sides(self, request: SimulatedRequest) -> list:
        return [(self.ours, request.kv), (self.real, self.real_kv(request))]

    def run(self, request: SimulatedRequest) -> None:
        self.enter(request, State.RUNNING)
        self.scheduler.waiting.remove(request)
        self.scheduler.running.append(request)

    def grow(self, request: SimulatedRequest, num_tokens: int) -> None:
        """Compute so many tokens of a request; their copies are complete at once."""
        ours, real = self.kvs(request)
        assert ours.num_new(num_tokens) == self.real.num_new(real, num_tokens)
        ours.grow(num_tokens)
        self.owner.growth.grow(real, num_tokens=num_tokens, num_accepted=num_tokens)
        real.num_tokens = num_tokens
        ours.num_sent_blocks = ours.num_copied_blocks = ours.num_full_blocks
        for group in real.groups:
            assert self.owner.prepare_save(real, group, real.num_full_blocks)
            group.num_saves_sent = group.num_host_blocks = real.num_full_blocks
        self.scheduler.fill(request, 0, num_tokens)
        self.scheduler.host.publish(ours.columns)
        self.owner.publishing.copied(real)
        ours.seal()
        self.ours.refresh(ours)
        self.owner.seal(real)

    # -- what happens to them ------------------------------------------------------------------

    def leave(self, request: SimulatedRequest) -> None:
        self.scheduler.forget(request)
        kv = self.records[request.request_id].kv
        if kv is not None:
            self.owner.forget(kv)
        del self.records[request.request_id]

    def park(self, request: SimulatedRequest) -> None:
        kv = self.real_kv(request)
        self.scheduler.preempt(request, 0.0)
        blocks = self.owner.park(kv)
        self.records[request.request_id].preempted()
        self.owner.pool.free_blocks(reversed(blocks))

    def put_back(self, request: SimulatedRequest) -> None:
        for moves, kv in self.sides(request):
            moves.put_back(kv)
        for record in (request.record, self.records[request.request_id]):
            record.put_back()

    def forget_behind(self, request: SimulatedRequest) -> None:
        """Share what others have, and compute the rest again."""
        for moves, kv in self.sides(request):
            moves.share(kv)
            if kv.num_shared:
                moves.keep_shared(kv)
        if request.kv.trunks:
            self.come(request, whole=True)
            self.grow(request, request.spec.num_prompt_tokens)

    def place(self, holders: tuple[KVState, Holder], group: int) -> None:
        """Let a group leave that is in the pool, or come back."""
        ours, real = holders
        if ours.restoring or ours.asleep:
            return
        if group in ours.offloaded:
            self.ours.restore(ours, group)
            self.real.restore(real, group)
            self.scheduler.take_in_copies()  # what the pool still had is there at once
        else:
            self.ours.offload(ours, [group])
            self.real.offload(real, [group])

    def nap(self, request: SimulatedRequest) -> None:
        """Let a request and what only it uses sleep and wake up."""
        pairs = zip(*(holders_of([kv]) for kv in self.kvs(request)), strict=True)
        for ours, real in pairs:
            if len(getattr(ours, "users", "1")) == 1 and not ours.restoring:
                self.ours.sleep(ours)
                self.real.sleep(real)
        self.check(sleeping=True)
        assert all([moves.wake(kv) for moves, kv in self.sides(request)])

    def arrived(self) -> None:
        """Let all copies that are under way be complete."""
        for kv in list(self.ours.all()):
            for job in kv.restoring.values():
                job.done_s = 0.0
        self.scheduler.take_in_copies()
        for holder in list(self.owner.holders()):
            for index in holder.restoring:
                restore = holder.groups[index].restore
                assert restore is not None
                self.owner.restores.arrive(holder, index, set(restore.under_way))

    # -- what both say -------------------------------------------------------------------------

    def holders(self) -> list[tuple[KVState, Holder]]:
        live = [request for request in self.scheduler.live if request.record.kv is not None]
        pairs: list = [self.kvs(request) for request in live]
        trunks = zip(self.ours.trunks.all, self.owner.trunks.all, strict=True)
        return [*pairs, *trunks]

    def check(self, *, sleeping: bool = False) -> None:
        if not sleeping:
            self.owner.check_integrity()
        self.ours.trunks.check_integrity(request.kv for request in self.scheduler.live)
        self.scheduler.pool.check_integrity()
        for ours, real in self.holders():
            assert (ours.first, ours.num_rows) == (real.first, real.num_rows)
            assert ours.num_owned == real.num_owned
            assert ours.num_own_tokens == real.num_own_tokens
            assert len(ours.columns) == len(real.columns)
            assert [*ours.offloaded] == real.offloaded
            assert (ours.asleep, ours.num_buffers) == (real.asleep, real.num_buffers)
            assert sleeping or ours.is_parked == real.is_parked
            if not ours.restoring:
                assert ours.num_owned_when_copied == real.num_owned_when_copied
                assert ours.view == real.view
            num_uses = [len(getattr(one, "users", "")) for one in (ours, real)]
            assert num_uses[0] == num_uses[1]
        assert self.scheduler.pool.num_free == self.owner.pool.get_num_free_blocks()
        assert self.scheduler.pool.num_left == self.owner.blocks.num_left
        assert sum(map(formula, self.ours.all())) == SHAPE.num_blocks - self.scheduler.pool.num_free


def formula(kv: KVState) -> int:
    """Return what a holder takes: by the formula, and what is on its way back."""
    residency = Residency(num_offloaded=len(kv.offloaded), num_staging=max(1, kv.num_buffers))
    num_blocks = num_request_blocks(GEOMETRY, residency, num_tokens=kv.num_own_tokens)
    num_full = kv.num_own_tokens // SHAPE.block_size
    num_buffers_fewer = 1 if kv.asleep and kv.offloaded else 0
    return num_blocks + (len(kv.restoring) - num_buffers_fewer) * num_full


OPERATIONS = (
    *("arrive", "arrive", "grow", "park", "park", "resume", "resume", "half", "again"),
    *("place", "place", "place", "arrived", "nap", "leave"),
)


class History:
    """Draws what happens next."""

    def __init__(self, seed: int) -> None:
        self.pair, self._rng = Pair(), random.Random(seed)
        self.seen = Counter[str]()

    def step(self) -> None:
        name = self._rng.choice(OPERATIONS)
        getattr(self, f"_{name}")()
        self.pair.check()
        for trunk in self.pair.ours.trunks.all:
            self.seen["offloaded"] += bool(trunk.offloaded)
            self.seen["shared"] += len(trunk.users) > 1
            self.seen["behind others"] += trunk.first > 0

    def _one(self, requests: list[SimulatedRequest]) -> list[SimulatedRequest]:
        """Return one of some, or none of none."""
        return [self._rng.choice(requests)] if requests else []

    def _running(self) -> list[SimulatedRequest]:
        running = self.pair.scheduler.running
        return self._one([one for one in running if not one.kv.restoring])

    def _waiting(self, *, is_prepared: bool) -> list[SimulatedRequest]:
        waiting = [one for one in self.pair.scheduler.waiting if one.record.kv is not None]
        return self._one([one for one in waiting if one.record.is_prepared == is_prepared])

    def _arrive(self) -> None:
        self.pair.arrive(self._rng.randrange(len(PROMPTS)), self._rng.randrange(300))

    def _grow(self) -> None:
        for request in self._running():
            self.pair.grow(request, request.kv.num_tokens + self._rng.randrange(300))

    def _park(self) -> None:
        for request in self._running():
            self.pair.park(request)

    def _resume(self) -> None:
        for request in self._waiting(is_prepared=False):
            self.pair.come(request, whole=self._rng.random() < 0.5)

    def _half(self) -> None:
        for request in self._waiting(is_prepared=True):
            self.pair.put_back(request)
        for request in self._waiting(is_prepared=False):
            self.pair.on_its_way(request, whole=self._rng.random() < 0.7)

    def _again(self) -> None:
        for request in self._waiting(is_prepared=False):
            self.pair.forget_behind(request)

    def _place(self) -> None:
        if holders := self.pair.holders():
            self.pair.place(self._rng.choice(holders), self._rng.randrange(4))

    def _arrived(self) -> None:
        self.pair.arrived()

    def _nap(self) -> None:
        for request in self._running():
            self.pair.nap(request)

    def _leave(self) -> None:
        for request in self._one(list(self.pair.scheduler.live)):
            self.pair.leave(request)


def test_the_executor_s_trunks_own_as_many_blocks() -> None:
    seen = Counter[str]()
    for seed in range(6):
        history = History(seed)
        for _ in range(60):
            history.step()
        seen.update(history.seen)
        counters = (history.pair.ours.host.counters, history.pair.owner.counters)
        assert counters[0].num_trunk_joins == counters[1].num_trunk_joins
        assert counters[0].num_trunk_splits == counters[1].num_trunk_splits
        seen["splits"] += counters[0].num_trunk_splits

    assert min(seen.values()) > 10
    assert len(seen) == 4
