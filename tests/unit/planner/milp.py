"""Another oracle for the solver: a mixed-integer program."""

import cvxpy as cp
import numpy as np

from services.planner.solver.instance import FORBIDDEN, Instance
from services.planner.solver.kernels.load import Board, load_of
from services.planner.solver.kernels.longest_path import critical_path
from services.planner.solver.library import PatternLibrary
from services.planner.solver.program import Cuts
from services.planner.solver.relaxation import joined, no_cuts


def by_milp(instance: Instance, library: PatternLibrary) -> float:
    """Return the least objective by CVXPY and HiGHS, with the longest paths as cuts."""
    requests, patterns = instance.use.shape
    pick = cp.Variable((requests, patterns), boolean=True)
    theta = cp.Variable()
    mass = instance.transfer_s @ pick
    blocks = cp.sum(cp.multiply(np.minimum(instance.use, FORBIDDEN), pick))
    constraints = [cp.sum(pick, axis=1) == 1]
    constraints.append(blocks <= instance.capacity)
    cuts = no_cuts(library)
    row, mask = np.empty(patterns), np.empty(library.num_groups)
    constraints.append(theta >= float(instance.compute_s.sum()))
    while True:
        known = [theta >= cuts.rows @ mass + cuts.masks @ instance.compute_s] if len(cuts) else []
        cost = theta + cp.sum(cp.multiply(instance.penalty_s, pick))
        problem = cp.Problem(cp.Minimize(cost), constraints + known)
        problem.solve(solver=cp.HIGHS, mip_rel_gap=0.0)
        if problem.status == cp.INFEASIBLE:
            return float("inf")
        choice = np.argmax(pick.value, axis=1)
        load = load_of(choice, Board(instance, library.tables))
        length = critical_path(load.mass, library.tables, instance.compute_s, row, mask)
        if length <= float(theta.value) * (1.0 + 1e-7):
            return float(problem.value)
        cuts = joined(cuts, Cuts(rows=row[None].copy(), masks=mask[None].copy()))
