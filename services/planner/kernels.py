"""Search kernels, compiled. They see arrays only; `search` and `relaxation` give them meaning.

A *choice* is one pattern column per request. `mass[k]` is the transfer time of one layer summed
over the requests that chose pattern k: the step's length depends on a choice through it alone.
"""

from typing import NamedTuple

import numpy as np

from services.planner.instance import FORBIDDEN, Instance
from services.planner.jit import compiled
from services.planner.library import Floats, Ints, Tables

IMPROVEMENT = 1e-10  # relative; less than this is rounding, not progress
MOVES_TRIED = 40  # of one sweep of the local search that finds nothing
ROOM = 1.0 + 1e-12  # relative slack of the capacity, for rounding


class Load(NamedTuple):
    """What a choice adds up to; kept up to date move by move."""

    mass: Floats  # [K] seconds
    users: Ints  # [K] requests per pattern; mass is exactly 0 where this is 0
    layer_blocks: Floats  # [L] offloaded blocks by layer, for Eq. 1
    sums: Floats  # [2] pool blocks without Eq. 1's buffer, penalty in seconds
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
        np.zeros(num_layers),
        np.zeros(2),
        np.zeros(num_layers + 1),
        np.zeros(num_patterns, np.int64),
    )


@compiled
def step_s(load: Load, board: Board) -> float:
    """Return the step's length by the event recursion over patterns."""
    mass, work, active = load.mass, load.work, load.active
    tables, compute_s = board.tables, board.instance.compute_s
    num_layers = compute_s.shape[0]
    for layer in range(num_layers + 1):
        work[layer] = 0.0
    num_active = 0
    for k in range(mass.shape[0]):
        if mass[k] > 0.0 and tables.first[k, 0] >= 0:
            active[num_active] = k
            num_active += 1
            work[tables.first[k, 0]] += mass[k]
            if tables.first[k, 1] >= 0:
                work[tables.first[k, 1]] += mass[k]
    total = 0.0
    head = 0
    for layer in range(num_layers):
        total += work[layer] + compute_s[layer]
        work[layer] = 0.0
        left = compute_s[layer]
        head = max(head, layer + 1)
        while head < num_layers:
            if work[head] > left:
                work[head] -= left
                break
            left -= work[head]
            work[head] = 0.0
            head += 1
        for a in range(num_active):
            target = tables.release[active[a], layer]
            if target >= 0:
                work[target] += mass[active[a]]
                head = min(head, target)
    return total


@compiled
def add(load: Load, board: Board, request: int, pattern: int) -> None:
    instance, tables = board
    load.mass[pattern] += instance.transfer_s[request]
    load.users[pattern] += 1
    load.sums[0] += instance.use[request, pattern]
    load.sums[1] += instance.penalty_s[request, pattern]
    if instance.eq1:
        for layer in range(load.layer_blocks.shape[0]):
            load.layer_blocks[layer] += instance.blocks[request] * tables.offloaded[pattern, layer]


@compiled
def remove(load: Load, board: Board, request: int, pattern: int) -> None:
    instance, tables = board
    load.mass[pattern] -= instance.transfer_s[request]
    load.users[pattern] -= 1
    if load.users[pattern] == 0:
        load.mass[pattern] = 0.0
    load.sums[0] -= instance.use[request, pattern]
    load.sums[1] -= instance.penalty_s[request, pattern]
    if instance.eq1:
        for layer in range(load.layer_blocks.shape[0]):
            load.layer_blocks[layer] -= instance.blocks[request] * tables.offloaded[pattern, layer]


@compiled
def add_all(load: Load, board: Board, requests: Ints, choice: Ints) -> None:
    for request in requests:
        add(load, board, request, choice[request])


@compiled
def used_blocks(load: Load, board: Board) -> float:
    if board.instance.eq1:
        return load.sums[0] + load.layer_blocks.max()
    return load.sums[0]


@compiled
def fits(load: Load, board: Board) -> bool:
    return used_blocks(load, board) <= board.instance.capacity * ROOM


@compiled
def load_of(choice: Ints, board: Board) -> Load:
    load = new_load(board.tables.num_jobs.shape[0], board.instance.compute_s.shape[0])
    for request in range(choice.shape[0]):
        add(load, board, request, choice[request])
    return load


@compiled
def objective_s(choice: Ints, board: Board) -> float:
    """Return step length + penalty of a choice."""
    load = load_of(choice, board)
    return step_s(load, board) + load.sums[1]


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
def critical_path(
    mass: Floats, tables: Tables, compute_s: Floats, row: Floats, mask: Floats
) -> float:
    """Return the step's length by the closed form, and the longest path.

    Fills `row[k]`, the copies of pattern k on the path, and `mask[l]`, 1 where layer l's compute
    is on it: for any mass w the step takes at least `row @ w + mask @ compute_s`.
    """
    num_layers = compute_s.shape[0]
    demand = _demand(mass, tables, num_layers)
    ends = np.zeros(num_layers + 1)
    source = np.full(num_layers + 1, -1, np.int64)
    for layer in range(1, num_layers + 1):
        start = ends[layer - 1]
        for i in range(layer):
            candidate = ends[i] + demand[i, layer]
            if candidate > start * (1.0 + 1e-13):
                start = candidate
                source[layer] = i
        ends[layer] = start + compute_s[layer - 1]
    row[:] = 0.0
    mask[:] = 0.0
    layer = num_layers
    while layer > 0:
        mask[layer - 1] = 1.0
        before = int(source[layer])
        if before >= 0:
            for k in range(row.shape[0]):
                row[k] += tables.demand[before, layer, k]
        layer = layer - 1 if before < 0 else before
    return float(ends[num_layers])


@compiled
def _demand(mass: Floats, tables: Tables, num_layers: int) -> Floats:
    """Return D(i, l): seconds of copies released after i and needed by l. [L+2, L+1]"""
    demand = np.zeros((num_layers + 2, num_layers + 1))
    for k in range(mass.shape[0]):
        if mass[k] > 0.0:
            for j in range(tables.num_jobs[k]):
                demand[tables.job_release[k, j], tables.job_needed[k, j]] += mass[k]
    for i in range(num_layers, -1, -1):  # suffix sums over i of prefix sums over l
        before = 0.0
        for layer in range(num_layers + 1):
            before += demand[i, layer]
            demand[i, layer] = before + demand[i + 1, layer]
    return demand


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
    load = load_of(choice, board)
    while not fits(load, board):
        over = used_blocks(load, board) - board.instance.capacity
        best, best_request, best_pattern = np.inf, -1, -1
        for request in range(choice.shape[0]):
            old = choice[request]
            for pattern in columns:
                freed = _freed(load, board, request, pattern, old)
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


@compiled
def _freed(load: Load, board: Board, request: int, pattern: int, old: int) -> float:
    instance, tables = board
    freed = instance.use[request, old] - instance.use[request, pattern]
    if instance.eq1 and freed > 0.0:
        peak = 0.0
        for layer in range(load.layer_blocks.shape[0]):
            moved = tables.offloaded[pattern, layer] - tables.offloaded[old, layer]
            peak = max(peak, load.layer_blocks[layer] + instance.blocks[request] * moved)
        freed -= peak - load.layer_blocks.max()
    return freed


class Frame(NamedTuple):
    """State of a depth-first search over some requests, so that it can go on where it stopped."""

    subset: Ints  # [S] requests to decide, in this order; the others keep their choice
    columns: Ints  # [S, J] patterns to try for each, by ascending priced cost
    cost: Floats  # [S, J] priced cost, a bound's share: see `relaxation`
    rest: Floats  # [S + 1, 2] least cost and least blocks of the requests after the first s
    path: Ints  # [S + 1] number of patterns already tried at each depth
    bound: Floats  # [S + 1] priced cost of what is chosen so far
    depth: Ints  # [1] -1 when the search is complete
    last_columns: Ints  # [J] patterns to try for the last request, least demanding first
    last_cost: Floats  # [J] their priced cost
    load: Load  # of the partial choice
    trial: Ints  # [R] the partial choice, -1 where undecided
    best: Ints  # [R] the best complete choice found
    value: Floats  # [1] its objective; what is not better is not looked at


@compiled
def search_subset(frame: Frame, board: Board, quota: int) -> int:
    """Search about `quota` nodes for something better than `value`; returns the nodes spent."""
    last = frame.subset.shape[0] - 1
    nodes = 0
    while frame.depth[0] >= 0 and nodes < quota:
        nodes += 1
        depth = frame.depth[0]
        request = frame.subset[depth]
        if frame.trial[request] >= 0:
            remove(frame.load, board, request, frame.trial[request])
            frame.trial[request] = -1
        if depth == last:
            nodes += _decide_last(frame, board, request)
            frame.depth[0] = depth - 1
            continue
        goal = frame.value[0] * (1.0 - IMPROVEMENT)
        at = frame.path[depth]
        if _exhausted(frame, depth, at, goal):
            frame.depth[0] = depth - 1
            continue
        frame.path[depth] = at + 1
        if not _descend(frame, board, request, frame.columns[depth, at]):
            continue
        if step_s(frame.load, board) + frame.load.sums[1] < goal:
            frame.bound[depth + 1] = frame.bound[depth] + frame.cost[depth, at]
            frame.path[depth + 1] = 0
            frame.depth[0] = depth + 1
    return nodes


@compiled
def _decide_last(frame: Frame, board: Board, request: int) -> int:
    """Find the best pattern for the last request; returns the patterns evaluated.

    Patterns come least demanding first: what one of them that fits does not reach, no pattern
    that demands at least as much at every layer and costs as much reaches either.
    """
    instance, tables = board
    depth = frame.depth[0]
    room = instance.capacity * ROOM
    tried = np.empty(frame.last_columns.shape[0], np.int64)
    num_tried = 0
    for c in range(frame.last_columns.shape[0]):
        pattern = frame.last_columns[c]
        goal = frame.value[0] * (1.0 - IMPROVEMENT)
        if frame.bound[depth] + frame.last_cost[c] >= goal:
            continue
        if frame.load.sums[0] + instance.use[request, pattern] > room:
            continue
        dominated = False
        for t in range(num_tried):
            if tables.dominates[tried[t], pattern]:
                cheaper = instance.penalty_s[request, tried[t]]
                dominated = dominated or cheaper <= instance.penalty_s[request, pattern]
        if dominated:
            continue
        add(frame.load, board, request, pattern)
        if used_blocks(frame.load, board) <= room:
            tried[num_tried] = pattern
            num_tried += 1
            reached = step_s(frame.load, board) + frame.load.sums[1]
            if reached < goal:
                frame.value[0] = reached
                frame.best[:] = frame.trial
                frame.best[request] = pattern
        remove(frame.load, board, request, pattern)
    return num_tried


@compiled
def _exhausted(frame: Frame, depth: int, at: int, goal: float) -> bool:
    """Say whether no column from `at` on can win: they are in ascending cost."""
    if at >= frame.columns.shape[1]:
        return True
    return frame.bound[depth] + frame.cost[depth, at] + frame.rest[depth + 1, 0] >= goal


@compiled
def _descend(frame: Frame, board: Board, request: int, pattern: int) -> bool:
    """Decide a request; False if the pool cannot hold it, with what the others need at least."""
    room = board.instance.capacity * ROOM - frame.rest[frame.depth[0] + 1, 1]
    if frame.load.sums[0] + board.instance.use[request, pattern] > room:
        return False
    add(frame.load, board, request, pattern)
    frame.trial[request] = pattern
    return used_blocks(frame.load, board) <= room


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
