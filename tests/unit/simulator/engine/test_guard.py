"""The guard before every step: who leaves the pool, who comes back, and what a plan may say."""

from dataclasses import replace

import pytest

from services.control.counters import Counters
from services.control.requests.life import Hold, State
from services.control.requests.request_record import RequestRecord
from services.control.room.capacity_guard import CapacityGuard, Need
from services.pacing.types import ServiceLevel
from services.placement.blocks import STATE, BlockGeometry
from services.placement.layer_placement import LayerPlacement
from services.placement.types import EngineShape, RequestId
from simulator.device.copies import Lane
from simulator.memory.host import HostLedger
from simulator.memory.kv import KVState
from simulator.memory.moves import CountedMoves
from simulator.memory.pool import PoolLedger
from simulator.memory.requests import SimulatedRequest, live_request
from simulator.workload import ArrivingRequest
from tests.unit.records import make_record

GEOMETRY = BlockGeometry(num_groups=4, block_size=4)
SHAPE = EngineShape(
    num_layers=4,
    layers_per_group=1,
    block_size=4,
    num_blocks=100,
    block_bytes=1,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)


def running(
    pool: PoolLedger, name: str, *, num_tokens: int, geometry: BlockGeometry
) -> SimulatedRequest:
    """Return a request that decodes, all of it resident and mirrored."""
    spec = ArrivingRequest(
        request_id=RequestId(name),
        arrival_s=0.0,
        num_prompt_tokens=num_tokens,
        num_output_tokens=8,
        level=ServiceLevel(),
    )
    request = live_request(spec, geometry)
    request.record.kv = KVState(request_id=name, geometry=geometry, mirrored=True)
    request.kv.grow(num_tokens - 1)
    request.kv.grow(num_tokens)
    request.kv.num_sent_blocks = request.kv.num_copied_blocks = request.kv.num_full_blocks
    request.num_computed_tokens = num_tokens
    request.record.enter(State.RUNNING)
    assert pool.set_owned(spec.request_id, request.kv.num_owned + request.kv.num_side_blocks)
    return request


class Bench:
    """A guard over some requests; those that run are needs, in the order in which they came."""

    def __init__(self, *, num_blocks: int, num_spare: int = 0, sides: tuple[int, ...] = ()) -> None:
        shape = replace(SHAPE, side_windows=sides, max_in_flight_tokens=64)
        self.pool = PoolLedger(num_blocks=num_blocks)
        self.h2d = Lane(bytes_per_s=1.0)
        self.moves = CountedMoves(
            shape,
            self.pool,
            HostLedger(num_blocks=1_000),
            lambda: list(self.moves.requests.values()),
            self.h2d,
        )
        self.records: dict[str, RequestRecord[KVState]] = {}
        self.guard = CapacityGuard(
            self.moves,
            self.records,
            Counters(),
            max_staging=2,
            restore_when_free_frac=num_spare / num_blocks,
        )

    def running(self, name: str, *, num_tokens: int) -> SimulatedRequest:
        geometry = self.moves.geometry
        request = running(self.pool, name, num_tokens=num_tokens, geometry=geometry)
        self.moves.requests[request.request_id] = request
        self.records[name] = request.record
        return request

    def adjust(
        self, active: list[SimulatedRequest], waiting: tuple[Need[KVState], ...] = ()
    ) -> None:
        needs = [
            Need(one.record, one.num_tokens, num_processed_tokens=one.num_computed_tokens)
            for one in active
        ]
        self.guard.adjust(needs, waiting)


def test_what_fits_stays() -> None:
    bench = Bench(num_blocks=100)
    a = bench.running("a", num_tokens=20)
    bench.adjust([a])

    assert a.kv.offloaded == ()
    assert bench.pool.num_free == 100 - 4 * 5


def test_the_newest_gives_way_to_the_first_in_line() -> None:
    # Two of 4 x 6 blocks fit 50 with their next tokens; a third needs 5 + 4 at least.
    bench = Bench(num_blocks=50)
    a, b = bench.running("a", num_tokens=20), bench.running("b", num_tokens=20)
    bench.adjust([a, b], (Need(make_record("c"), 20),))

    assert a.kv.offloaded == ()
    assert b.kv.offloaded
    assert bench.pool.num_free >= 5 + 4


@pytest.mark.parametrize(("sides", "leaves"), [((), False), ((5,), False), ((8, STATE), True)])
def test_what_never_leaves_takes_room_from_what_may(sides: tuple[int, ...], leaves: bool) -> None:
    # 4 x 6 blocks each with the next token: beside them 3 of a window of 5 and that token, or 3 of
    # one of 8 and a state's.
    bench = Bench(num_blocks=55, sides=sides)
    a, b = bench.running("a", num_tokens=20), bench.running("b", num_tokens=20)
    bench.adjust([a, b])

    assert a.kv.offloaded == ()
    assert bool(b.kv.offloaded) == leaves


@pytest.mark.parametrize(("num_blocks", "is_whole"), [(36, True), (35, False)])
def test_what_an_idle_request_keeps_in_any_case_is_nobodys_to_plan_with(
    num_blocks: int, is_whole: bool
) -> None:
    # An idle one keeps 4 open blocks, 3 of its window and a state; 4 x 6 + 4 are left for another.
    bench = Bench(num_blocks=num_blocks, sides=(8, STATE))
    b = bench.running("b", num_tokens=22)
    b.record.enter(State.PAUSED)

    found = bench.guard.place_new(Need(make_record("c"), 20, num_processed_tokens=20), [])

    assert bench.moves.num_side_blocks(b.kv) == 4
    assert (not found.offloaded) == is_whole


@pytest.mark.parametrize(("state", "is_whole"), [(State.LEAVING, True), (State.PAUSED, False)])
def test_who_leaves_sends_nobodys_layers_to_the_host(state: State, is_whole: bool) -> None:
    # Two of 4 x 6 blocks fit 50, but not beside the 4 open blocks of another.
    bench = Bench(num_blocks=50)
    a, b = bench.running("a", num_tokens=20), bench.running("b", num_tokens=22)
    b.record.enter(state)

    found = bench.guard.place_new(Need(make_record("c"), 20), [Need(a.record, 20)])

    assert (not found.offloaded) == is_whole


def test_a_plans_placement_is_a_floor_and_what_is_beyond_it_comes_back() -> None:
    bench = Bench(num_blocks=200)
    a = bench.running("a", num_tokens=20)
    a.record.floor = LayerPlacement(offloaded=frozenset({1, 2}), num_staging=1)
    bench.adjust([a])
    assert a.kv.offloaded == (1, 2)

    a.record.floor = LayerPlacement(offloaded=frozenset({1}), num_staging=1)
    bench.adjust([a])
    assert set(a.kv.restoring) == {2}
    bench.h2d.advance(100.0)
    assert a.kv.take_in_restores() == 1
    assert a.kv.offloaded == (1,)


def test_nothing_comes_back_into_what_is_kept_free() -> None:
    # 5 blocks of 4 groups and one offloaded: 15 + 5 staged of 25, and 5 are not enough beyond 4.
    bench = Bench(num_blocks=25, num_spare=4)
    a = bench.running("a", num_tokens=20)
    a.kv.offload([3], num_free=0)
    bench.moves.refresh(a.kv)
    assert bench.pool.num_free == 5
    bench.adjust([a])

    assert not a.kv.restoring


def test_paused_requests_lose_theirs_first() -> None:
    bench = Bench(num_blocks=50)
    a, b = bench.running("a", num_tokens=20), bench.running("b", num_tokens=20)
    b.record.hold(Hold.PLAN, 0.0)
    bench.adjust([a], (Need(make_record("c"), 28),))

    assert a.kv.offloaded == ()
    assert b.kv.asleep
    assert b.kv.offloaded
