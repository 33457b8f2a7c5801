"""Every block has one owner at every step, and every row shows the right KV, whatever happens."""

import random

import pytest

from services.placement.blocks import Residency, num_request_blocks
from services.placement.layer_placement import ALL_RESIDENT, LayerPlacement
from tests.unit.executor.simulated_ranks import BLOCK_SIZE, Simulation

pytestmark = pytest.mark.filterwarnings("default")


def placed(*groups: int, num_staging: int = 1) -> LayerPlacement:
    return LayerPlacement(offloaded=frozenset(groups), num_staging=num_staging)


def random_placement(rng: random.Random, num_groups: int) -> LayerPlacement:
    density = rng.random()
    groups = frozenset(g for g in range(num_groups) if rng.random() < density)
    return LayerPlacement(offloaded=groups, num_staging=rng.choice((1, 2)))


def change_at_random(sim: Simulation) -> None:
    """Admit, end, offload and restore, as a planner without any sense might."""
    rng = sim.rng
    if len(sim.lengths) < 5 and rng.random() < 0.3:
        sim.admit(random_placement(rng, sim.num_groups), num_slots=rng.choice((0, 80, 200)))
    if sim.lengths and rng.random() < 0.05:
        sim.end(rng.choice(list(sim.lengths)))
    for request_id in list(sim.lengths):
        request = sim.kv(request_id)
        if not request.mirrored or rng.random() > 0.3:
            continue
        sim.place(request, random_placement(rng, sim.num_groups))


def random_tokens(sim: Simulation) -> dict[str, int]:
    """Decode most requests by a token, and prefill those that are short in random chunks."""
    tokens = {}
    for request_id, length in sim.lengths.items():
        if sim.rng.random() < 0.9:
            tokens[request_id] = sim.rng.randrange(1, 14) if length < 20 else 1
    return tokens


def run_at_random(sim: Simulation, num_steps: int) -> None:
    """Take steps, each after random changes, now and then with the pool relieved."""
    for _ in range(num_steps):
        sim.settle()
        change_at_random(sim)
        if sim.rng.random() < 0.1:
            sim.transfers.relieve()
        sim.step(random_tokens(sim))


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("max_mirrored", [1_000, 0, 3])
@pytest.mark.parametrize("seed", range(8))
def test_random_changes_never_show_a_layer_anything_but_its_own_kv(
    seed: int, depth: int, max_mirrored: int
) -> None:
    sim = Simulation(seed=seed, depth=depth, max_mirrored=max_mirrored, num_slots=300)

    run_at_random(sim, num_steps=150)
    for request_id in list(sim.lengths):
        sim.end(request_id)
    sim.drain()

    assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1
    assert sim.owner.host.num_free == sim.num_slots
    assert sim.owner.counters.num_restored_groups > 0
    assert sim.owner.counters.num_sealed_blocks > 0


@pytest.mark.parametrize("num_staging", [1, 2])
@pytest.mark.parametrize("num_offloaded", [0, 1, 2, 4])
def test_the_pool_loses_exactly_what_the_block_formula_says(
    num_offloaded: int, num_staging: int
) -> None:
    sim = Simulation(seed=1, depth=0)
    request = sim.admit(placed(*range(num_offloaded), num_staging=num_staging))
    residency = Residency(num_offloaded=num_offloaded, num_staging=num_staging)

    for num_tokens in (1, 3, 4, 5, 9, 1, 1, 1, 1, 1):  # also chunks that end within a block
        sim.settle()
        before = sim.transfers.owner.pool.get_num_free_blocks()
        sim.step({request.request_id: num_tokens})
        assert before >= sim.pool.get_num_free_blocks()
        in_transit = request.num_blocks_in_transit()
        formula = num_request_blocks(
            sim.owner.geometry, residency, num_tokens=sim.lengths[request.request_id]
        )
        num_owned = sim.num_blocks - 1 - sim.pool.get_num_free_blocks()
        assert num_owned == formula + in_transit


def test_nothing_is_in_transit_once_copies_are_complete() -> None:
    sim = Simulation(seed=2, depth=0)
    request = sim.admit(placed(0, 2, 3))
    sim.step({request.request_id: 21})  # 5 full blocks and an open one
    for _ in range(5):
        sim.step({})
        for rank in sim.ranks:
            rank.engine.progress()
        sim.settle()

    num_owned = sim.num_blocks - 1 - sim.pool.get_num_free_blocks()

    assert request.num_blocks_in_transit() == 0
    assert num_owned == 6 + 5 + 3  # one resident group, one buffer, three open blocks


def test_a_prompt_larger_than_the_pool_is_prefilled_straight_to_its_placement() -> None:
    sim = Simulation(seed=3, depth=0, num_blocks=31)  # 25 blocks of 4 groups would be 100
    request = sim.admit(placed(0, 1, 2, 3))

    for chunk in (40, 40, 20):
        sim.settle()
        sim.step({request.request_id: chunk})

    assert sim.lengths[request.request_id] == 100


def test_a_row_flips_only_when_every_rank_has_restored_the_group() -> None:
    sim = Simulation(seed=4, depth=0)
    request = sim.admit(placed(1, 3))
    sim.step({request.request_id: 21})
    sim.settle()
    assert sim.owner.restores.begin(request, 3)
    order = sim.owner.orders.take(loading=[], saves=[])
    first, second = sim.ranks
    one = first.run_step(order, [])
    restore_id = order.restores[0].restore_id
    first.engine.wait(first.runner._restores[restore_id].ticket)
    sim.transfers.absorb(one.aggregate(first.runner.feedback()))

    sim.settle()
    assert request.groups[3].offloaded  # the second rank has not even begun

    other = second.run_step(order, [])
    second.engine.wait(second.runner._restores[restore_id].ticket)
    sim.transfers.absorb(other.aggregate(second.runner.feedback()))
    sim.settle()
    assert not request.groups[3].offloaded


def test_targets_of_a_cancelled_restore_are_not_reused_before_every_rank_has_let_go() -> None:
    sim = Simulation(seed=5, depth=0)
    request = sim.admit(placed(0, 1, 2, 3))
    sim.step({request.request_id: 21})
    sim.settle()
    sim.owner.restores.begin(request, 0)
    assert request.groups[0].restore is not None
    targets = {block.block_id for block in request.groups[0].restore.targets.values()}
    sim.step({})  # the ranks have heard of it
    sim.end(request.request_id)

    free = {block.block_id for block in sim.pool.free_block_queue.get_all_free_blocks()}
    assert not targets & free

    sim.drain()
    free = {block.block_id for block in sim.pool.free_block_queue.get_all_free_blocks()}
    assert targets <= free


def test_a_request_without_room_on_the_host_stays_resident_and_runs() -> None:
    sim = Simulation(seed=6, depth=0, num_slots=4)
    request = sim.admit(placed(0, 1), num_slots=40)

    sim.step({request.request_id: 21})

    assert request.placement == ALL_RESIDENT


def test_a_request_that_outgrows_the_host_pool_keeps_its_new_blocks() -> None:
    sim = Simulation(seed=7, depth=0, num_slots=8)  # two full blocks of four groups
    request = sim.admit(placed(0, 1, 2, 3), num_slots=8)

    for _ in range(6):
        sim.settle()
        sim.step({request.request_id: 3})

    assert sim.lengths[request.request_id] == 18
    assert sim.owner.host.num_free == 0


def test_while_a_group_is_restored_the_others_seal_only_what_fills_every_buffer() -> None:
    sim = Simulation(seed=8, depth=0)
    request = sim.admit(placed(0, 3, num_staging=2))
    sim.step({request.request_id: 8})
    sim.settle()
    assert sim.owner.restores.begin(request, 3)
    restoring = request.groups[3].restore
    assert restoring is not None

    for _ in range(6):  # fills a block in both groups; only group 0 may give its own up
        sim.step({request.request_id: 1})
        sim.transfers.settle()
        if request.groups[3].restore is None:
            break
        sim.owner.check_integrity()
        # One own block cannot become the staging block of two buffers.
        assert request.staging_length == 2 or len(request.staging) == 1
    sim.drain()

    assert request.offloaded == [0]
    assert request.staging_length == request.num_tokens // BLOCK_SIZE


def test_copies_out_of_staging_give_no_blocks_back_and_copies_of_own_blocks_do() -> None:
    sim = Simulation(11, num_blocks=20, depth=2)
    sim.admit(placed(0, 1, 2, 3))
    sim.step({"r1": 4 * BLOCK_SIZE})  # a prefill straight into staging

    assert sim.transfers.write_through.is_busy
    assert not sim.transfers.write_through.frees_blocks()

    sim.drain()
    sim.step({"r1": 1})
    sim.step({"r1": BLOCK_SIZE - 1})  # fills an open block, which was the request's own
    assert sim.transfers.write_through.frees_blocks()
    sim.drain()
