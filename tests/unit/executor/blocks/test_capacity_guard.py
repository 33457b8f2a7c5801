"""The capacity guard: enough offloaded that everybody fits, and no more; never in its own way."""

import pytest

from services.control.room.capacity_guard import CapacityGuard, Need
from services.executor.blocks.residency import RequestKV
from services.executor.blocks.transfers.moves import BlockMoves
from services.placement.layer_placement import LayerPlacement
from tests.unit.executor.simulated_ranks import Simulation
from tests.unit.records import make_record

pytestmark = pytest.mark.filterwarnings("default")


def make_guard(
    sim: Simulation, *, max_staging: int = 1, restore_when_free_frac: float = 0.0
) -> CapacityGuard[RequestKV]:
    return CapacityGuard(
        BlockMoves(sim.owner, sim.transfers),
        sim.records,
        sim.owner.counters,
        max_staging=max_staging,
        restore_when_free_frac=restore_when_free_frac,
    )


def needs_of(sim: Simulation) -> list[Need[RequestKV]]:
    return [Need(sim.records[name], length + 1) for name, length in sim.lengths.items()]


def run(sim: Simulation, num_tokens: dict[str, int]) -> None:
    """Run a step, and let its copies end."""
    sim.step(num_tokens)
    for rank in sim.ranks:
        for _ in range(50):
            rank.engine.progress()
    sim.step({})
    sim.settle()


def grown(sim: Simulation, num_tokens: int) -> RequestKV:
    request = sim.admit(LayerPlacement())
    run(sim, {request.request_id: num_tokens})
    return request


def test_nothing_is_offloaded_while_everything_fits() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=60)
    request = grown(sim, 40)  # 40 of 59 blocks

    make_guard(sim).adjust(needs_of(sim), [])

    assert request.offloaded == []


def test_a_waiting_request_makes_room_for_itself_among_running_ones() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=60)
    request = grown(sim, 40)
    waiting = Need(make_record("next"), 80)  # 20 full blocks: at least 20 + 4 open

    guard = make_guard(sim)
    guard.adjust(needs_of(sim), [waiting])
    run(sim, {})

    assert len(request.offloaded) == 2  # 2 * 11 + 10 + 2 = 34 of 35
    assert guard.place_new(waiting, needs_of(sim)).offloaded == frozenset(range(4))
    assert sim.pool.get_num_free_blocks() >= 24


def test_layers_come_back_when_there_is_room_again() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=60)
    request = grown(sim, 40)
    guard = make_guard(sim)
    guard.adjust(needs_of(sim), [Need(make_record("next"), 80)])
    run(sim, {})
    assert request.offloaded

    for _ in range(20):
        guard.adjust(needs_of(sim), [])
        run(sim, {})

    assert request.offloaded == []


def test_restores_leave_room_for_the_next_step() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=60)
    request = grown(sim, 40)  # the next token opens a block in each of 4 groups
    sim.owner.offload(request, range(4))
    sim.transfers.write_through.note(request)
    run(sim, {})
    num_free = sim.pool.get_num_free_blocks()
    hoarder = sim.pool.get_new_blocks(num_free - 13)  # 13 free: a restore takes 10

    make_guard(sim).adjust(needs_of(sim), [])
    assert len(request.offloaded) == 4
    assert all(group.restore is None for group in request.groups)

    sim.pool.free_blocks(hoarder[:1])  # 14 free: 10 for the restore, 4 for the next token
    make_guard(sim).adjust(needs_of(sim), [])
    assert sum(group.restore is not None for group in request.groups) == 1
    assert (
        sim.owner.growth.num_new_blocks(request, num_tokens=41, num_accepted=41)
        <= sim.pool.get_num_free_blocks()
    )


def test_a_given_placement_is_a_floor_that_the_guard_adds_to() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=60)
    request = grown(sim, 40)
    guard = make_guard(sim)
    request.record.floor = LayerPlacement(offloaded=frozenset({0, 1}))

    guard.adjust(needs_of(sim), [])
    run(sim, {})
    assert request.offloaded == [0, 1]

    guard.adjust(needs_of(sim), [Need(make_record("next"), 100)])
    run(sim, {})
    assert {0, 1} < set(request.offloaded)


def test_a_request_without_room_on_the_host_is_left_alone() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=60, num_slots=0)
    request = sim.admit(LayerPlacement(), num_slots=1)
    run(sim, {request.request_id: 40})

    make_guard(sim).adjust(needs_of(sim), [Need(make_record("next"), 80)])

    assert request.offloaded == []


def test_a_request_that_does_not_run_gives_way_before_a_running_one_is_offloaded() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=60)
    paused = grown(sim, 20)  # 20 of 59 blocks
    running = grown(sim, 20)
    guard = make_guard(sim)
    waiting = Need(make_record("next"), 20)  # 24 with room for its next token

    guard.adjust([Need(running.record, 21)], [waiting])
    run(sim, {})

    assert running.offloaded == []
    assert len(paused.offloaded) == 2  # 24 + 24 leave 11; two layers of five blocks stay
    assert paused.asleep
    assert sim.pool.get_num_free_blocks() >= 24


def test_what_a_request_that_does_not_run_holds_is_left_to_it_while_there_is_room() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=60)
    paused = grown(sim, 20)
    running = grown(sim, 20)

    make_guard(sim).adjust([Need(running.record, 21)], [])

    assert not paused.asleep
    assert paused.offloaded == []


def test_a_running_request_without_blocks_is_relieved_by_one_that_does_not_run() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=60)
    paused = grown(sim, 20)
    running = grown(sim, 20)
    guard = make_guard(sim)
    guard.adjust([Need(running.record, 21)], [])
    num_free = sim.pool.get_num_free_blocks()

    assert guard.relieve()

    assert sim.pool.get_num_free_blocks() > num_free
    assert paused.offloaded
    assert running.offloaded == []


@pytest.mark.parametrize(("max_ahead_tokens", "num_left", "num_next"), [(0, 0, 0), (3, 2, 4)])
def test_drafts_have_room_while_a_block_fills_and_is_on_its_way(
    max_ahead_tokens: int, num_left: int, num_next: int
) -> None:
    """39 tokens are 4 x 10 of 43 blocks. Drafts open an eleventh, whatever the tenth is by then."""
    sim = Simulation(seed=1, depth=0, num_blocks=44, max_ahead_tokens=max_ahead_tokens)
    request = grown(sim, 38)
    guard = make_guard(sim)
    (need,) = needs_of(sim)

    guard.adjust([need], [])

    assert len(request.offloaded) == num_left  # one is not enough: 3 x 11 + 9 + 2
    assert guard.num_blocks_of_next_step([need]) == num_next
