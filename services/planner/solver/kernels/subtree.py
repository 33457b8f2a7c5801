"""Depth-first branch and bound over some requests, the others as they are."""

from typing import NamedTuple

import numpy as np

from services.planner.solver.jit import compiled
from services.planner.solver.kernels.load import (
    IMPROVEMENT,
    ROOM,
    Board,
    Load,
    add,
    remove,
)
from services.planner.solver.kernels.step import step_s
from services.planner.solver.library import Floats, Ints


class SearchFrame(NamedTuple):
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
def search_subset(frame: SearchFrame, board: Board, quota: int) -> int:
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
def _decide_last(frame: SearchFrame, board: Board, request: int) -> int:
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
        if frame.load.sums[0] <= room:
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
def _exhausted(frame: SearchFrame, depth: int, at: int, goal: float) -> bool:
    """Say whether no column from `at` on can win: they are in ascending cost."""
    if at >= frame.columns.shape[1]:
        return True
    return frame.bound[depth] + frame.cost[depth, at] + frame.rest[depth + 1, 0] >= goal


@compiled
def _descend(frame: SearchFrame, board: Board, request: int, pattern: int) -> bool:
    """Decide a request; False if the pool cannot hold it, with what the others need at least."""
    room = board.instance.capacity * ROOM - frame.rest[frame.depth[0] + 1, 1]
    if frame.load.sums[0] + board.instance.use[request, pattern] > room:
        return False
    add(frame.load, board, request, pattern)
    frame.trial[request] = pattern
    return frame.load.sums[0] <= room
