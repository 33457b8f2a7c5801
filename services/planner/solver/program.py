"""The placement problem in CVXPY: the model of record.

A step is as long as its longest path, so it is at least as long as any one path p through the
step: with `A_p` the copies of each pattern on the path and `M_p` the layers whose compute is on
it,

    theta >= A_p w + M_p comp        for every path p ("cut"),

and equal to the largest. `w_k` is the transfer time of one layer (tau_r), summed over the
requests with pattern k. The relaxation lets requests be split between patterns; then only w
matters, and the program has as many variables as patterns, whatever the batch:

    minimise  theta + tie @ w    subject to   sum(w) = 1,  U w <= capacity,  cuts

in shares of the batch's transfer time. Every number that changes from plan to plan is a parameter
(DPP), so CVXPY compiles the problem once. The binary program, the oracle of the tests, has one
row of 0/1 variables per request instead.
"""

from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import numpy as np

from services.planner.solver.instance import TIE_BREAK
from services.planner.solver.library import Floats, PatternLibrary

NUM_SLOTS = 8  # cuts that one plan may add to the pool's


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cuts:
    """Paths through the step, P of them."""

    rows: Floats  # [P, K] A_p: copies of pattern k on the path
    masks: Floats  # [P, L] M_p: 1 where layer l's compute is on the path

    def __len__(self) -> int:
        return int(self.rows.shape[0])


def no_stall_cut(library: PatternLibrary) -> Cuts:
    """Return the path through all layers' compute: T is never less."""
    return Cuts(rows=np.zeros((1, library.num_patterns)), masks=np.ones((1, library.num_groups)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shares:
    """The parameters of one relaxation, as multiples of the batch's transfer time and blocks."""

    compute: Floats  # [L] comp_l / sum_r tau_r
    capacity: float  # blocks / sum_r b_r, >= the least U_k


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relaxed:
    """Solution of the relaxation."""

    shares: Floats  # [K] w, sums to 1
    theta: float  # length of the step / sum_r tau_r, as far as the cuts know
    cut_prices: Floats  # [P + slots in use] lambda >= 0
    capacity_price: float  # mu >= 0


class PlacementProgram:
    """The relaxation, over a fixed pool of cuts and a few slots for new ones."""

    def __init__(self, library: PatternLibrary, pool: Cuts) -> None:
        tables, num_layers = library.tables, library.num_groups
        self.library, self.pool = library, pool
        self._compute = cp.Parameter(num_layers, nonneg=True)
        self._capacity = cp.Parameter(nonneg=True)
        self._slot_rows = cp.Parameter((NUM_SLOTS, library.num_patterns), nonneg=True)
        self._slot_compute = cp.Parameter(NUM_SLOTS, nonneg=True)
        self.shares = cp.Variable(library.num_patterns, nonneg=True)
        self.theta = cp.Variable()
        self._capacity_row = tables.units @ self.shares <= self._capacity
        self._pool_rows = self.theta >= pool.rows @ self.shares + pool.masks @ self._compute
        self._slots = self.theta >= self._slot_rows @ self.shares + self._slot_compute
        objective = self.theta + TIE_BREAK * (tables.num_jobs @ self.shares)
        every = cp.sum(self.shares) == 1
        constraints = [every, self._capacity_row, self._pool_rows, self._slots]
        self.problem = cp.Problem(cp.Minimize(objective), constraints)

    def values(self, shares: Shares, extra: Cuts) -> dict[int, Floats]:
        """Return the value of each parameter by its CVXPY id; zeros may be left out.

        `extra`: at most NUM_SLOTS cuts beside the pool's.
        """
        capacity = np.array(shares.capacity)
        values = {self._compute.id: shares.compute, self._capacity.id: capacity}
        if len(extra) == 0:
            return values
        rows = np.zeros(self._slot_rows.shape)
        compute = np.zeros(NUM_SLOTS)
        rows[: len(extra)] = extra.rows
        compute[: len(extra)] = extra.masks @ shares.compute
        return values | {self._slot_rows.id: rows, self._slot_compute.id: compute}

    def set(self, shares: Shares, extra: Cuts) -> None:
        """Set every parameter of the CVXPY problem."""
        values = self.values(shares, extra)
        for parameter in self.problem.parameters():
            parameter.value = values.get(parameter.id, np.zeros(parameter.shape))

    def compiled(self) -> dict[str, Any]:
        """Return the standard form with the parameters set: c, A, b and variable bounds."""
        data, _, _ = self.problem.get_problem_data(cp.HIGHS)
        return dict(data)

    def columns(self) -> tuple[Floats, int]:
        """Return where `shares` and `theta` are in the standard form's variables."""
        start = self.compiled()["param_prob"].var_id_to_col
        first = start[self.shares.id]
        return np.arange(first, first + self.library.num_patterns), start[self.theta.id]

    def solve(self, num_extra: int = 0) -> Relaxed:
        """Solve through CVXPY: what the fast path must equal."""
        self.problem.solve(solver=cp.HIGHS)
        pool, slots = self._pool_rows.dual_value, self._slots.dual_value[:num_extra]
        return Relaxed(
            shares=np.maximum(self.shares.value, 0.0),
            theta=float(self.theta.value),
            cut_prices=np.maximum(np.concatenate([pool, slots]), 0.0),
            capacity_price=max(float(self._capacity_row.dual_value), 0.0),
        )
