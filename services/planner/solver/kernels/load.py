"""What a choice adds up to.

A *choice* is one pattern column per request. `mass[k]` is the transfer time of one layer summed
over the requests that chose pattern k: the step's length depends on a choice through it alone.
"""

from typing import NamedTuple

import numpy as np

from services.planner.solver.instance import Instance
from services.planner.solver.jit import compiled
from services.planner.solver.library import Floats, Ints, Tables

ROOM = 1.0 + 1e-12  # relative slack of the capacity, for rounding
IMPROVEMENT = 1e-10  # relative; less than this is rounding, not progress


class Load(NamedTuple):
    """What a choice adds up to; kept up to date move by move."""

    mass: Floats  # [K] seconds
    users: Ints  # [K] requests per pattern; mass is exactly 0 where this is 0
    sums: Floats  # [2] pool blocks, penalty in seconds
    work: Floats  # [L + 1] scratch
    active: Ints  # [K] scratch


class Board(NamedTuple):
    """What does not change during a search."""

    instance: Instance
    tables: Tables


@compiled
def new_load(num_patterns: int, num_layers: int) -> Load:
    return Load(
        np.zeros(num_patterns),
        np.zeros(num_patterns, np.int64),
        np.zeros(2),
        np.zeros(num_layers + 1),
        np.zeros(num_patterns, np.int64),
    )


@compiled
def add(load: Load, board: Board, request: int, pattern: int) -> None:
    instance = board.instance
    load.mass[pattern] += instance.transfer_s[request]
    load.users[pattern] += 1
    load.sums[0] += instance.use[request, pattern]
    load.sums[1] += instance.penalty_s[request, pattern]


@compiled
def remove(load: Load, board: Board, request: int, pattern: int) -> None:
    instance = board.instance
    load.mass[pattern] -= instance.transfer_s[request]
    load.users[pattern] -= 1
    if load.users[pattern] == 0:
        load.mass[pattern] = 0.0
    load.sums[0] -= instance.use[request, pattern]
    load.sums[1] -= instance.penalty_s[request, pattern]


@compiled
def add_all(load: Load, board: Board, requests: Ints, choice: Ints) -> None:
    for request in requests:
        add(load, board, request, choice[request])


@compiled
def fits(load: Load, board: Board) -> bool:
    return load.sums[0] <= board.instance.capacity * ROOM


@compiled
def load_of(choice: Ints, board: Board) -> Load:
    load = new_load(board.tables.num_jobs.shape[0], board.instance.compute_s.shape[0])
    for request in range(choice.shape[0]):
        add(load, board, request, choice[request])
    return load
