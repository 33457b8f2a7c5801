"""Lower bound and prices of a placement problem.

The relaxation's duals (lambda of the cuts, mu of the capacity) price each pattern for each request,

    cost[r, k] = tau_r * lambda @ A_k + mu * use[r, k] + penalty[r, k],

and for *any* lambda >= 0 with sum 1 and mu >= 0, every placement that fits has

    objective >= lambda @ M @ comp - mu * capacity + sum_r min_k cost[r, k].

So the bound is valid for the exact problem, however roughly the relaxation was solved.
"""

from dataclasses import dataclass

import numpy as np

from services.planner.solver.fast_path import FastPath, SolverFailedError
from services.planner.solver.instance import FORBIDDEN, Instance
from services.planner.solver.kernels.longest_path import critical_path, path_row
from services.planner.solver.library import Floats, PatternLibrary
from services.planner.solver.program import (
    NUM_SLOTS,
    Cuts,
    PlacementProgram,
    Relaxed,
    Shares,
    no_stall_cut,
)

CUT_TOLERANCE = 3e-4  # relative; below it a new cut cannot move the bound enough to matter
POOL_TOLERANCE = 1e-6
# The relaxation of equal layers has two parameters; the pool knows the paths on this grid of them.
POOL_COMPUTE_SHARES = np.geomspace(0.002, 2.0, 24)
POOL_CAPACITY_FRACS = np.linspace(0.05, 1.0, 20)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bound:
    """What the relaxation says about an instance."""

    lower_bound_s: float  # certified
    base_s: float  # lower_bound_s = base_s + sum_r min_k cost[r, k]
    cost: Floats  # [R, K] priced cost; inf where the pattern is not allowed
    shares: Floats  # [K] of the transfer time that the relaxation gives to each pattern


class Relaxation:
    """Solves relaxations over one pattern library. Holds a solver: not thread-safe."""

    def __init__(self, library: PatternLibrary) -> None:
        """Build the pool of cuts, the same one every time. Takes about a second."""
        self._library = library
        self._none = no_cuts(library)
        pool = no_stall_cut(library)
        self._solver = FastPath(PlacementProgram(library, pool))
        self._pool = pool
        for compute_share in POOL_COMPUTE_SHARES:
            found = self._none
            for frac in POOL_CAPACITY_FRACS:
                shares = self._clamped(np.full(library.num_groups, compute_share), frac)
                _, extra = self._solve(shares, POOL_TOLERANCE)
                found = joined(found, extra)
            if len(found):
                pool = distinct(joined(pool, found))
                self._solver = FastPath(PlacementProgram(library, pool))
                self._pool = pool

    @property
    def pool(self) -> Cuts:
        return self._pool

    def _clamped(self, compute: Floats, capacity_frac: float) -> Shares:
        least = float(self._library.tables.units.min())
        capacity = max(capacity_frac * self._library.num_groups, least)
        return Shares(compute=compute, capacity=capacity)

    def bound(self, instance: Instance, library: PatternLibrary) -> Bound:
        """Return prices and the certified bound over all columns of `library`.

        It may extend this one's; prices of any column follow from the paths that are paid for.
        """
        total_s = float(instance.transfer_s.sum())
        if total_s <= 0.0:
            return self._without_solver(instance)
        room = (instance.capacity - instance.fixed_blocks) / max(instance.share_blocks, 1e-300)
        shares = self._clamped(instance.compute_s / total_s, room / self._library.num_groups)
        try:
            relaxed, extra = self._solve(shares, CUT_TOLERANCE)
        except SolverFailedError:  # numbers beyond a solver's scale: what needs none is certain
            return self._without_solver(instance)
        return self._priced(instance, relaxed, joined(self._pool, extra), library)

    def _without_solver(self, instance: Instance) -> Bound:
        """Bound the step by its compute. Exact where nothing is full, so nothing can leave."""
        cost = np.where(instance.use >= FORBIDDEN, np.inf, instance.penalty_s)
        base_s = float(instance.compute_s.sum())
        shares = np.zeros(instance.use.shape[1])
        shares[0] = 1.0
        bound_s = base_s + float(cost.min(axis=1).sum())
        return Bound(lower_bound_s=bound_s, base_s=base_s, cost=cost, shares=shares)

    def _solve(self, shares: Shares, tolerance: float) -> tuple[Relaxed, Cuts]:
        """Add the longest path of each solution until the solution knows it."""
        extra = self._none
        row = np.empty(self._library.num_patterns)
        mask = np.empty(self._library.num_groups)
        while True:
            relaxed = self._solver.solve(shares, extra)
            length = critical_path(relaxed.shares, self._library.tables, shares.compute, row, mask)
            if length <= relaxed.theta * (1.0 + tolerance) or len(extra) == NUM_SLOTS:
                return relaxed, extra
            extra = joined(extra, Cuts(rows=row[None].copy(), masks=mask[None].copy()))

    def _priced(
        self, instance: Instance, relaxed: Relaxed, cuts: Cuts, library: PatternLibrary
    ) -> Bound:
        cut_prices = relaxed.cut_prices / relaxed.cut_prices.sum()
        per_block = float(instance.transfer_s.sum()) / max(instance.share_blocks, 1e-300)
        capacity_price = relaxed.capacity_price * per_block
        per_second = cut_prices @ cuts.rows
        if len(library.extra):
            more = extra_prices(cut_prices, cuts, library)
            per_second = np.concatenate([per_second, more])
        cost = np.outer(instance.transfer_s, per_second)
        cost += capacity_price * instance.use + instance.penalty_s
        cost[instance.use >= FORBIDDEN] = np.inf
        base_s = float(cut_prices @ (cuts.masks @ instance.compute_s))
        base_s -= capacity_price * instance.capacity
        return Bound(
            lower_bound_s=base_s + float(cost.min(axis=1).sum()),
            base_s=base_s,
            cost=cost,
            shares=np.pad(relaxed.shares, (0, len(library.extra))),
        )


def extra_prices(cut_prices: Floats, cuts: Cuts, library: PatternLibrary) -> Floats:
    """Return lambda @ A for the columns that the cuts' rows do not have."""
    row = np.empty(library.num_patterns)
    total = np.zeros(len(library.extra))
    for cut in np.flatnonzero(cut_prices):
        path_row(cuts.masks[cut], library.tables, row)
        total += cut_prices[cut] * row[library.extra]
    return total


def no_cuts(library: PatternLibrary) -> Cuts:
    return Cuts(rows=np.zeros((0, library.num_patterns)), masks=np.zeros((0, library.num_groups)))


def joined(first: Cuts, second: Cuts) -> Cuts:
    if len(second) == 0:
        return first
    return Cuts(
        rows=np.vstack([first.rows, second.rows]), masks=np.vstack([first.masks, second.masks])
    )


def distinct(cuts: Cuts) -> Cuts:
    """Return each path once, in order of first appearance."""
    both = np.hstack([cuts.rows, cuts.masks])
    _, first = np.unique(both, axis=0, return_index=True)
    kept = np.sort(first)
    return Cuts(rows=cuts.rows[kept], masks=cuts.masks[kept])
