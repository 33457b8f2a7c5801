"""Choices without search: one pattern for all, a relaxation dealt out, and repair to fit."""

import numpy as np

from services.planner.solver.instance import FORBIDDEN, Instance
from services.planner.solver.jit import compiled
from services.planner.solver.kernels.load import Board, add, fits, load_of, remove
from services.planner.solver.kernels.step import step_s
from services.planner.solver.library import Floats, Ints


@compiled
def best_uniform(board: Board, columns: Ints) -> int:
    """Return the column that is best for all requests alike, -1 if none fits."""
    best, least = -1, np.inf
    choice = np.zeros(board.instance.transfer_s.shape[0], np.int64)
    for column in columns:
        choice[:] = column
        load = load_of(choice, board)
        if fits(load, board):
            value = step_s(load, board) + load.sums[1]
            if value < least:
                best, least = column, value
    return best


@compiled
def deal_out(order: Ints, instance: Instance, columns: Ints, left: Floats, choice: Ints) -> None:
    """Give each request of `order` the allowed column with most of `left` seconds left."""
    for request in order:
        best = 0
        most = -np.inf
        for c in range(columns.shape[0]):
            if left[c] > most and instance.use[request, columns[c]] < FORBIDDEN:
                best, most = c, left[c]
        choice[request] = columns[best]
        left[best] -= instance.transfer_s[request]


@compiled
def repair(choice: Ints, board: Board, columns: Ints, prices: Floats) -> bool:
    """Change `choice` until it fits: each time the move of least price per block freed.

    Returns False, with `choice` spoilt, where no move frees anything.
    """
    load, use = load_of(choice, board), board.instance.use
    while not fits(load, board):
        over = load.sums[0] - board.instance.capacity
        best, best_request, best_pattern = np.inf, -1, -1
        for request in range(choice.shape[0]):
            old = choice[request]
            for pattern in columns:
                freed = use[request, old] - use[request, pattern]
                if freed > 0.0:
                    price = max(prices[request, pattern] - prices[request, old], 0.0)
                    score = (price + 1e-12) / min(freed, over)
                    if score < best:
                        best, best_request, best_pattern = score, request, pattern
        if best_request < 0:
            return False
        remove(load, board, best_request, choice[best_request])
        add(load, board, best_request, best_pattern)
        choice[best_request] = best_pattern
    return True
