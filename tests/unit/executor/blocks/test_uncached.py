"""Leading KV that is not kept: one scratch block for all layer groups, and what reads it."""

import pytest

from services.executor.blocks.residency import RequestKV
from services.placement.layer_placement import ALL_RESIDENT, LayerPlacement
from tests.unit.executor.blocks.test_block_life import change_at_random, random_tokens
from tests.unit.executor.simulated_ranks import Simulation

pytestmark = pytest.mark.filterwarnings("default")

NUM_TOKENS = 21  # 5 full blocks of 4, and an open one


def make_simulation(seed: int = 1, **options: int) -> Simulation:
    return Simulation(seed=seed, depth=0, **options)


def with_tokens(sim: Simulation, placement: LayerPlacement = ALL_RESIDENT) -> RequestKV:
    """Return a request whose copies to the host are complete."""
    request = sim.admit(placement)
    sim.step({request.request_id: NUM_TOKENS})
    sim.drain()
    return request


def num_owned(sim: Simulation) -> int:
    return sim.num_blocks - 1 - sim.pool.get_num_free_blocks()


def test_a_dropped_position_leaves_one_block_of_one_per_layer_group() -> None:
    sim = make_simulation()
    request = with_tokens(sim)
    assert num_owned(sim) == 4 * 6

    sim.uncache(request.request_id, 3)

    assert num_owned(sim) == 4 * 3 + 3
    assert request.num_saved == 9
    sim.step({request.request_id: 1})  # every layer reads its own KV


def test_without_a_shadow_a_layer_reads_another_ones_kv() -> None:
    sim = make_simulation()
    request = with_tokens(sim)
    sim.uncache(request.request_id, 3)
    sim._shadows = lambda scheduled: []  # type: ignore[method-assign]

    with pytest.raises(AssertionError, match="attention reads"):
        sim.step({request.request_id: 1})


def test_a_position_that_is_kept_again_is_computed_once_more_into_its_own_blocks() -> None:
    sim = make_simulation()
    request = with_tokens(sim)
    sim.uncache(request.request_id, 3)
    sim.step({request.request_id: 1})

    sim.uncache(request.request_id, 1)
    assert request.num_recomputed == 3
    sim.step({request.request_id: 1})
    sim.uncache(request.request_id, 1)

    assert request.num_recomputed == 1
    assert num_owned(sim) == 4 * 5 + 1
    sim.step({request.request_id: 1})


def test_an_open_block_is_never_dropped() -> None:
    sim = make_simulation()
    request = with_tokens(sim)

    sim.uncache(request.request_id, 100)

    assert len(request.uncached) == 5


def test_what_has_no_complete_copy_is_not_dropped_unless_it_shall_have_none() -> None:
    sim = make_simulation(max_mirrored=0)
    mirrored, other = sim.admit(ALL_RESIDENT), sim.admit(ALL_RESIDENT, num_slots=10**6)
    assert mirrored.mirrored
    assert not other.mirrored
    sim.step({mirrored.request_id: NUM_TOKENS, other.request_id: NUM_TOKENS})

    sim.uncache(mirrored.request_id, 2)
    sim.uncache(other.request_id, 2)

    assert (len(mirrored.uncached), len(other.uncached)) == (0, 2)


def test_where_blocks_are_lacking_a_prefix_shrinks_as_far_as_they_go() -> None:
    sim = make_simulation()
    request = with_tokens(sim)
    sim.uncache(request.request_id, 5)
    taken = sim.pool.get_new_blocks(sim.pool.get_num_free_blocks() - 9)

    # 4 blocks each: two of the five positions.
    sim.owner.uncached.set_length(request, 0, num_known=NUM_TOKENS)
    sim.pool.free_blocks(taken)

    assert len(request.uncached) == 3
    sim.step({request.request_id: 1})


@pytest.mark.parametrize("num_staging", [1, 2])
def test_staging_begins_behind_the_scratch(num_staging: int) -> None:
    sim = make_simulation()
    away = LayerPlacement(offloaded=frozenset({0, 2, 3}), num_staging=num_staging)
    request = with_tokens(sim, away)
    # Five full blocks of one resident group and of each buffer; four open blocks.
    assert num_owned(sim) == 5 * (1 + num_staging) + 4

    sim.uncache(request.request_id, 2)

    assert num_owned(sim) == 3 * (1 + num_staging) + 4 + 2
    sim.step({request.request_id: 1})
    sim.owner.restores.begin(request, 2)
    sim.drain()
    assert request.offloaded == [0, 3]
    sim.step({request.request_id: 1})


def test_a_request_that_is_parked_leaves_no_scratch() -> None:
    sim = make_simulation()
    request = with_tokens(sim)
    sim.uncache(request.request_id, 4)
    sim.step({request.request_id: 1})

    assert sim.park(request.request_id) == 20  # tokens, all that had a copy
    assert num_owned(sim) == 0
    assert not sim.owner.uncached.kvs


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("max_mirrored", [1_000, 0, 3])
@pytest.mark.parametrize("seed", range(4))
def test_random_prefixes_under_random_changes_never_show_a_layer_anything_but_its_own_kv(
    seed: int, depth: int, max_mirrored: int
) -> None:
    sim = Simulation(seed=seed, depth=depth, max_mirrored=max_mirrored, num_slots=300)

    for _ in range(150):
        sim.settle()
        for request_id, length in sim.lengths.items():
            if length and sim.rng.random() < 0.5:
                sim.uncache(request_id, sim.rng.randrange(12))
        change_at_random(sim)
        if sim.rng.random() < 0.1:
            sim.transfers.relieve()
        sim.step(random_tokens(sim))
    for request_id in list(sim.lengths):
        sim.end(request_id)
    sim.drain()

    assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1
    assert sim.owner.uncached.num_dropped_blocks > 20
    assert sim.owner.uncached.num_kept_blocks > 0
