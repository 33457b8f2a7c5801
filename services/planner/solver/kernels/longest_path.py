"""How long the step of a load takes, by the closed form, and which path makes it so long."""

import numpy as np

from services.planner.solver.jit import compiled
from services.planner.solver.library import Floats, Tables


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
def path_row(mask: Floats, tables: Tables, row: Floats) -> None:
    """Fill `row[k]`, the copies of pattern k on the path whose layers `mask` names.

    For any mass w the step takes at least `row @ w + mask @ compute_s`.
    """
    row[:] = 0.0
    before = 0
    for layer in range(1, mask.shape[0] + 1):
        if mask[layer - 1] > 0.0:
            for k in range(row.shape[0]):
                row[k] += tables.demand[before, layer, k]
            before = layer


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
