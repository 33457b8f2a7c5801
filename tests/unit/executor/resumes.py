"""Resumes over a simulation's blocks."""

from services.control.room.capacity_guard import CapacityGuard
from services.control.room.resumes import Resumes
from services.executor.blocks.residency import RequestKV
from services.executor.blocks.transfers.moves import BlockMoves
from tests.unit.executor.simulated_ranks import Simulation


def resumes_of(sim: Simulation) -> Resumes[RequestKV]:
    moves = BlockMoves(sim.owner, sim.transfers)
    guard = CapacityGuard(
        moves, sim.records, sim.owner.counters, max_staging=2, restore_when_free_frac=0.0
    )
    return Resumes(moves, guard, sim.owner.counters, block_bytes=1)
