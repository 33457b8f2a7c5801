"""Single moves that shorten the longest path."""

import numpy as np

from services.planner.solver.instance import FORBIDDEN
from services.planner.solver.jit import compiled
from services.planner.solver.kernels.load import (
    IMPROVEMENT,
    Board,
    Load,
    add,
    fits,
    load_of,
    remove,
)
from services.planner.solver.kernels.longest_path import critical_path
from services.planner.solver.kernels.step import step_s
from services.planner.solver.library import Floats, Ints

MOVES_TRIED = 40  # of one sweep that finds nothing


@compiled
def local_search(choice: Ints, board: Board, columns: Ints, quota: int) -> int:
    """Improve `choice` by single moves along the longest path; returns the moves evaluated."""
    instance, tables = board
    load = load_of(choice, board)
    row = np.zeros(tables.num_jobs.shape[0])
    mask = np.zeros(instance.compute_s.shape[0])
    spent = 0
    while True:
        length = critical_path(load.mass, tables, instance.compute_s, row, mask)
        moved, tried = _best_move(choice, load, board, _gains(choice, board, columns, row), columns)
        spent += tried
        if not moved or spent >= quota or length <= 0.0:
            return spent


@compiled
def _gains(choice: Ints, board: Board, columns: Ints, row: Floats) -> Floats:
    """Return by how much each move at least changes the objective: its change on this path."""
    instance = board.instance
    gains = np.full((choice.shape[0], columns.shape[0]), np.inf)
    for request in range(choice.shape[0]):
        tau, old = instance.transfer_s[request], choice[request]
        here = row[old] * tau + instance.penalty_s[request, old]
        for c in range(columns.shape[0]):
            if instance.use[request, columns[c]] < FORBIDDEN:
                there = row[columns[c]] * tau + instance.penalty_s[request, columns[c]]
                gains[request, c] = there - here
    return gains


@compiled
def _best_move(
    choice: Ints, load: Load, board: Board, gains: Floats, columns: Ints
) -> tuple[bool, int]:
    """Make the most promising move that fits and helps; returns (made one, moves tried)."""
    value = step_s(load, board) + load.sums[1]
    tried = 0
    for move in np.argsort(gains.ravel(), kind="mergesort"):
        request, pattern = move // columns.shape[0], columns[move % columns.shape[0]]
        if gains[request, move % columns.shape[0]] >= -IMPROVEMENT * value or tried >= MOVES_TRIED:
            break
        old = choice[request]
        remove(load, board, request, old)
        add(load, board, request, pattern)
        tried += 1
        if fits(load, board) and (step_s(load, board) + load.sums[1] < value * (1.0 - IMPROVEMENT)):
            choice[request] = pattern
            return True, tried
        remove(load, board, request, pattern)
        add(load, board, request, old)
    return False, tried
