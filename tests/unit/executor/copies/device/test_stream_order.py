"""The order of a step holds on a device: waits on streams suffice, and each kind is needed."""

import itertools
import random
import time
from collections.abc import Iterator

import pytest

from services.executor.copies import pages as pages_module
from services.executor.copies.device import lane as lane_module
from services.executor.copies.device.stream_copy_engine import StreamCopyEngine
from tests.unit.executor.blocks.test_block_life import run_at_random
from tests.unit.executor.simulated_ranks import Simulation
from tests.unit.executor.stream_ranks import BLOCKS_PER_CHUNK, PAGE_BYTES, StreamRank

pytestmark = pytest.mark.filterwarnings("default")


DEPTHS, SEEDS = range(3), range(4)
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "CHUNK_BYTES", BLOCKS_PER_CHUNK * PAGE_BYTES)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "CLOSE_TIMEOUT_S", PATIENCE_S)


def is_whole(sim: Simulation) -> bool:
    return sim.pool.get_num_free_blocks() == sim.num_blocks - 1


def drain(sim: Simulation) -> None:
    """Run idle steps until the threads of the rank have copied everything."""
    end_s = time.monotonic() + PATIENCE_S
    sim.drain()
    while not is_whole(sim) and time.monotonic() < end_s:
        time.sleep(0.01)
        sim.drain()


def run(
    seed: int,
    *,
    depth: int,
    num_steps: int = 80,
    full_graphs: bool = False,
    guarded: bool = False,
) -> list[str]:
    """Run random changes on ranks with streams; return what went wrong."""
    sim = Simulation(seed=seed, depth=depth, num_slots=300, num_ranks=1)
    rank = StreamRank(sim.num_groups, random.Random(seed), guarded=guarded)
    rank.replays_full_graphs = full_graphs
    sim.ranks = [rank]
    try:
        run_at_random(sim, num_steps)
        for request_id in list(sim.lengths):
            sim.end(request_id)
        drain(sim)
        assert is_whole(sim)
        assert rank.runner.num_loads > 50
        assert not rank.runner.watch.failures
        assert not guarded or rank.runner.engine.totals().num_checked_blocks > 50
    finally:
        rank.close()
    return rank.faults


def cases() -> Iterator[object]:
    """Return all cases: on commits half of them, in which every two parameters meet."""
    for seed, depth in itertools.product(SEEDS, DEPTHS):
        yield pytest.param(seed, depth, marks=pytest.mark.nightly if (seed + depth) % 2 else ())


@pytest.mark.parametrize(("seed", "depth"), list(cases()))
def test_every_access_of_random_steps_is_ordered(seed: int, depth: int) -> None:
    assert run(seed, depth=depth) == []


def test_steps_without_hooks_where_none_are_needed_are_ordered_too() -> None:
    assert run(1, depth=2, full_graphs=True) == []


def test_a_guard_reads_in_order_and_finds_nothing_wrong() -> None:
    assert run(2, depth=2, guarded=True) == []


def test_layers_that_do_not_wait_for_copies_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamCopyEngine, "wait", lambda *args: 0.0)

    assert run(0, depth=1) != []
