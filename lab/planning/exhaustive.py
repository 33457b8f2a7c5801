"""An oracle for the solver: every placement in turn."""

import numpy as np

from services.planner.solver.instance import Instance
from services.planner.solver.jit import compiled
from services.planner.solver.kernels.load import Board, load_of
from services.planner.solver.kernels.step import step_s
from services.planner.solver.library import PatternLibrary


def exhaustive(
    instance: Instance, library: PatternLibrary, columns: np.ndarray | None = None
) -> float:
    """Return the least objective of all placements that fit, infinity if none does."""
    every = np.arange(library.num_patterns) if columns is None else columns
    return _least_objective(Board(instance, library.tables), every)


@compiled
def _least_objective(board: Board, columns: np.ndarray) -> float:
    choice = np.zeros(board.instance.transfer_s.shape[0], np.int64)
    least = np.inf
    for number in range(len(columns) ** len(choice)):
        left = number
        for request in range(len(choice)):
            choice[request] = columns[left % len(columns)]
            left //= len(columns)
        load = load_of(choice, board)
        if load.sums[0] <= board.instance.capacity:
            least = min(least, step_s(load, board) + load.sums[1])
    return least
