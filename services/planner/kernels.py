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
ROOM = 1.0 + 1e-12  # relative slack of the capacity, for rounding


class Load(NamedTuple):
    """What a choice adds up to; kept up to date move by move."""

    mass: Floats  # [K] seconds
    count: Ints  # [K] requests per pattern; mass is exactly 0 where this is 0
    layer_blocks: Floats  # [L] offloaded blocks by layer, for Eq. 1
    sums: Floats  # [2] pool blocks without Eq. 1's buffer, penalty in seconds
    work: Floats  # [L + 1] scratch
    active: Ints  # [K] scratch


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
def step_s(load: Load, tables: Tables, compute_s: Floats) -> float:
    """Return the step's length by the event recursion over patterns."""
    mass, work, active = load.mass, load.work, load.active
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
def add(load: Load, instance: Instance, tables: Tables, request: int, pattern: int) -> None:
    load.mass[pattern] += instance.transfer_s[request]
    load.count[pattern] += 1
    load.sums[0] += instance.use[request, pattern]
    load.sums[1] += instance.penalty_s[request, pattern]
    if instance.eq1:
        for layer in range(load.layer_blocks.shape[0]):
            load.layer_blocks[layer] += instance.blocks[request] * tables.offloaded[pattern, layer]


@compiled
def remove(load: Load, instance: Instance, tables: Tables, request: int, pattern: int) -> None:
    load.mass[pattern] -= instance.transfer_s[request]
    load.count[pattern] -= 1
    if load.count[pattern] == 0:
        load.mass[pattern] = 0.0
    load.sums[0] -= instance.use[request, pattern]
    load.sums[1] -= instance.penalty_s[request, pattern]
    if instance.eq1:
        for layer in range(load.layer_blocks.shape[0]):
            load.layer_blocks[layer] -= instance.blocks[request] * tables.offloaded[pattern, layer]


@compiled
def used_blocks(load: Load, instance: Instance) -> float:
    if instance.eq1:
        return load.sums[0] + load.layer_blocks.max()
    return load.sums[0]


@compiled
def load_of(choice: Ints, instance: Instance, tables: Tables) -> Load:
    load = new_load(tables.num_jobs.shape[0], instance.compute_s.shape[0])
    for request in range(choice.shape[0]):
        add(load, instance, tables, request, choice[request])
    return load


@compiled
def objective_s(choice: Ints, instance: Instance, tables: Tables) -> tuple[float, float]:
    """Return (step length + penalty, pool blocks) of a choice."""
    load = load_of(choice, instance, tables)
    return step_s(load, tables, instance.compute_s) + load.sums[1], used_blocks(load, instance)


@compiled
def critical_path(
    mass: Floats, tables: Tables, compute_s: Floats, row: Floats, mask: Floats
) -> float:
    """Return the step's length by the closed form, and the longest path.

    Fills `row[k]`, the copies of pattern k on the path, and `mask[l]`, 1 where layer l's compute
    is on it: for any mass w the step takes at least `row @ w + mask @ compute_s`.
    """
    num_layers = compute_s.shape[0]
    work = np.zeros((num_layers + 2, num_layers + 1))
    for k in range(mass.shape[0]):
        if mass[k] > 0.0:
            for j in range(tables.num_jobs[k]):
                work[tables.job_release[k, j], tables.job_needed[k, j]] += mass[k]
    for i in range(num_layers, -1, -1):  # D(i, l) as suffix sums of prefix sums
        before = 0.0
        for layer in range(num_layers + 1):
            before += work[i, layer]
            work[i, layer] = before + work[i + 1, layer]
    ends = np.zeros(num_layers + 1)
    source = np.full(num_layers + 1, -1, np.int64)
    for layer in range(1, num_layers + 1):
        start = ends[layer - 1]
        for i in range(layer):
            candidate = ends[i] + work[i, layer]
            if candidate > start * (1.0 + 1e-13):
                start = candidate
                source[layer] = i
        ends[layer] = start + compute_s[layer - 1]
    row[:] = 0.0
    mask[:] = 0.0
    layer = num_layers
    while layer > 0:
        mask[layer - 1] = 1.0
        i = source[layer]
        if i < 0:
            layer -= 1
        else:
            for k in range(row.shape[0]):
                row[k] += tables.demand[i, layer, k]
            layer = i
    return ends[num_layers]


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
def repair(choice: Ints, instance: Instance, tables: Tables, columns: Ints, prices: Floats) -> bool:
    """Change `choice` until it fits: each time the move of least price per block freed.

    Returns False, with `choice` spoilt, where no move frees anything.
    """
    load = load_of(choice, instance, tables)
    while True:
        over = used_blocks(load, instance) - instance.capacity
        if over <= instance.capacity * (ROOM - 1.0):
            return True
        best, best_request, best_pattern = np.inf, -1, -1
        for request in range(choice.shape[0]):
            old = choice[request]
            for pattern in columns:
                freed = _freed(load, instance, tables, request, pattern, old)
                if freed > 0.0:
                    price = max(prices[request, pattern] - prices[request, old], 0.0)
                    score = (price + 1e-12) / min(freed, over)
                    if score < best:
                        best, best_request, best_pattern = score, request, pattern
        if best_request < 0:
            return False
        remove(load, instance, tables, best_request, choice[best_request])
        add(load, instance, tables, best_request, best_pattern)
        choice[best_request] = best_pattern


@compiled
def _freed(
    load: Load, instance: Instance, tables: Tables, request: int, pattern: int, old: int
) -> float:
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


@compiled
def search_subset(
    frame: Frame,
    load: Load,
    instance: Instance,
    tables: Tables,
    trial: Ints,
    best: Ints,
    value: Floats,
    quota: int,
) -> int:
    """Search up to `quota` nodes for something better than `value[0]`; returns the nodes spent.

    `load` and `trial` are the partial choice, `best` the best complete one found so far. The
    search is complete when `frame.depth[0]` is -1.
    """
    size = frame.subset.shape[0]
    num_columns = frame.columns.shape[1]
    nodes = 0
    while frame.depth[0] >= 0 and nodes < quota:
        depth = frame.depth[0]
        request = frame.subset[depth]
        if trial[request] >= 0:
            remove(load, instance, tables, request, trial[request])
            trial[request] = -1
        at = frame.path[depth]
        goal = value[0] * (1.0 - IMPROVEMENT)
        nodes += 1
        if (
            at >= num_columns
            or frame.bound[depth] + frame.cost[depth, at] + frame.rest[depth + 1, 0] >= goal
        ):
            frame.depth[0] -= 1  # columns are in ascending cost: none of the later ones is better
            continue
        frame.path[depth] = at + 1
        pattern = frame.columns[depth, at]
        if (
            load.sums[0] + instance.use[request, pattern] + frame.rest[depth + 1, 1]
            > instance.capacity * ROOM
        ):
            continue
        add(load, instance, tables, request, pattern)
        trial[request] = pattern
        if used_blocks(load, instance) + frame.rest[depth + 1, 1] > instance.capacity * ROOM:
            continue
        reached = step_s(load, tables, instance.compute_s) + load.sums[1]
        if reached >= goal:
            continue
        if depth == size - 1:
            value[0] = reached
            best[:] = trial
            continue
        frame.bound[depth + 1] = frame.bound[depth] + frame.cost[depth, at]
        frame.path[depth + 1] = 0
        frame.depth[0] = depth + 1
    return nodes


@compiled
def local_search(
    choice: Ints, instance: Instance, tables: Tables, columns: Ints, quota: int
) -> tuple[float, int]:
    """Improve `choice` by single moves along the longest path; returns (objective, evaluations).

    A move changes the length by at least what it changes on the present longest path, so moves
    are tried in that order and the rest is skipped once it cannot win.
    """
    num_requests, num_columns = choice.shape[0], columns.shape[0]
    load = load_of(choice, instance, tables)
    row = np.zeros(tables.num_jobs.shape[0])
    mask = np.zeros(instance.compute_s.shape[0])
    gain = np.zeros(num_requests * num_columns)
    spent = 0
    while True:
        length = critical_path(load.mass, tables, instance.compute_s, row, mask)
        value = length + load.sums[1]
        for request in range(num_requests):
            old = choice[request]
            tau = instance.transfer_s[request]
            here = row[old] * tau + instance.penalty_s[request, old]
            for c in range(num_columns):
                k = columns[c]
                there = row[k] * tau + instance.penalty_s[request, k]
                allowed = instance.use[request, k] < FORBIDDEN
                gain[request * num_columns + c] = there - here if allowed else np.inf
        found = False
        for move in np.argsort(gain, kind="mergesort"):
            if spent >= quota or gain[move] >= -IMPROVEMENT * value:
                break
            request, pattern = move // num_columns, columns[move % num_columns]
            old = choice[request]
            remove(load, instance, tables, request, old)
            add(load, instance, tables, request, pattern)
            spent += 1
            if used_blocks(load, instance) <= instance.capacity * ROOM and step_s(
                load, tables, instance.compute_s
            ) + load.sums[1] < value * (1.0 - IMPROVEMENT):
                choice[request] = pattern
                found = True
                break
            remove(load, instance, tables, request, pattern)
            add(load, instance, tables, request, old)
        if not found:
            return value, max(spent, 1)
