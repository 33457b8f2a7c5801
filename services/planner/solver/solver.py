"""The optimiser: an exact placement for one batch at one size, or how far from exact it is."""

from copy import copy
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from services.placement.step_time.patterns import PatternSpace
from services.placement.types import PlanStatus
from services.planner.solver.budget import Budget, NodeBudget, Share
from services.planner.solver.instance import (
    FORBIDDEN,
    Instance,
    Weights,
    make_instance,
    pool_blocks,
)
from services.planner.solver.kernels.load import ROOM, Board, load_of
from services.planner.solver.kernels.step import step_s
from services.planner.solver.library import Ints, PatternLibrary, pattern_library
from services.planner.solver.relaxation import Bound, Relaxation
from services.planner.solver.search import (
    Incumbent,
    Problem,
    branch_and_bound,
    first_plans,
    large_neighbourhoods,
    proven,
)

MAX_EXACT_REQUESTS = 6  # above, branch and bound decides a few requests at a time
MAX_SHARED_PRICES = 8  # up to here a second relaxation costs more time than it saves
EVEN_NODES = 1_000  # of one search, spent at most on even distances before all patterns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """The answer for one instance."""

    status: PlanStatus
    choice: Ints | None  # [R] pattern columns; None iff INFEASIBLE or UNDECIDED
    objective_s: float  # exact; inf without a choice
    step_s: float  # length of the step, exact, without the time outside the layers
    lower_bound_s: float  # certified, of the objective


class Solver:
    """Solves instances over one pattern library. Not thread-safe."""

    def __init__(self, library: PatternLibrary) -> None:
        self.library = library
        self._relaxation = Relaxation(library)
        self._even: Solver | None = None
        if len(library.even) < library.num_patterns:
            even = pattern_library(library.num_groups, PatternSpace.EVEN)
            self._even = Solver(even)

    def over(self, library: PatternLibrary) -> "Solver":
        """Return this solver for a library that extends its own. They share what they hold."""
        other = copy(self)
        other.library = library
        return other

    def bound(self, instance: Instance) -> Bound:
        return self._relaxation.bound(instance, self.library)

    def fits(self, instance: Instance, choice: Ints) -> bool:
        """Say whether a choice is allowed and within the capacity."""
        return pool_blocks(instance, choice) <= instance.capacity * ROOM

    def solve(
        self, instance: Instance, budget: Budget, *, starts: list[Ints], seed: int = 0
    ) -> Solution:
        """Return the best placement found within the budget.

        A first plan is made in any case: it is never worse than the best even spacing of the
        whole batch, nor than any of `starts` that fits.
        """
        if instance.num_requests == 0:
            return _empty(instance)
        if self.cannot_fit(instance):
            return _none(PlanStatus.INFEASIBLE)
        problem = Problem(instance=instance, library=self.library, bound=self.bound(instance))
        incumbent = Incumbent(problem)
        first_plans(problem, starts, incumbent)
        complete = self._improve(problem, incumbent, budget, seed)
        return self._answer(problem, incumbent, complete)

    def cannot_fit(self, instance: Instance) -> bool:
        """Say whether no placement fits the pool, for certain."""
        least = instance.use.min(axis=1)
        too_much = float(least.sum()) > instance.capacity * ROOM
        return too_much or bool((least >= FORBIDDEN).any())

    def _improve(self, problem: Problem, incumbent: Incumbent, budget: Budget, seed: int) -> bool:
        """Search until the budget ends; returns whether nothing better exists."""
        if proven(problem, incumbent):
            return True
        every, even = np.arange(self.library.num_patterns), self.library.even
        num_requests = problem.instance.num_requests
        if num_requests <= MAX_EXACT_REQUESTS or incumbent.choice is None:
            few = np.concatenate([even, self.library.extra])
            if not branch_and_bound(problem, few, incumbent, budget):
                return False
            return len(few) == len(every) or branch_and_bound(problem, every, incumbent, budget)
        self._search_even(problem, incumbent, budget, seed)
        large_neighbourhoods(problem, every, incumbent, budget, seed)
        return proven(problem, incumbent)

    def _search_even(
        self, problem: Problem, incumbent: Incumbent, budget: Budget, seed: int
    ) -> None:
        """Offer the best of the paper's space: its own relaxation prices it more sharply."""
        if self._even is None or not budget.allows():
            return
        if problem.instance.num_requests <= MAX_SHARED_PRICES:
            share = Share(budget, EVEN_NODES)
            large_neighbourhoods(problem, self.library.even, incumbent, share, seed)
            return
        even, instance = self.library.even, problem.instance
        smaller = instance._replace(
            use=np.ascontiguousarray(instance.use[:, even]),
            penalty_s=np.ascontiguousarray(instance.penalty_s[:, even]),
        )
        budget.spend(1)
        found = self._even.solve(smaller, Share(budget, EVEN_NODES), starts=[], seed=seed)
        if found.choice is not None:
            incumbent.offer(even[found.choice])

    def _answer(self, problem: Problem, incumbent: Incumbent, complete: bool) -> Solution:
        choice = incumbent.choice
        if choice is None:
            return _none(PlanStatus.INFEASIBLE if complete else PlanStatus.UNDECIDED)
        objective, length_s = score(problem.instance, choice, self.library)
        bound_s = problem.bound.lower_bound_s
        return Solution(
            status=PlanStatus.OPTIMAL if complete else PlanStatus.FEASIBLE,
            choice=choice,
            objective_s=objective,
            step_s=length_s,
            lower_bound_s=objective if complete else min(bound_s, objective),
        )


def _none(status: PlanStatus) -> Solution:
    infinite = float("inf")
    return Solution(
        status=status, choice=None, objective_s=infinite, step_s=infinite, lower_bound_s=infinite
    )


def _empty(instance: Instance) -> Solution:
    length_s = float(instance.compute_s.sum())
    return Solution(
        status=PlanStatus.OPTIMAL,
        choice=np.zeros(0, dtype=np.int64),
        objective_s=length_s,
        step_s=length_s,
        lower_bound_s=length_s,
    )


def score(instance: Instance, choice: Ints, library: PatternLibrary) -> tuple[float, float]:
    """Return (objective, length of the step) of a choice from `library`, exactly, in seconds."""
    board = Board(instance, library.tables)
    load = load_of(choice, board)
    length_s = step_s(load, board)
    return length_s + float(load.sums[1]), length_s


@lru_cache(maxsize=8)
def warm_solver(num_groups: int, space: PatternSpace) -> Solver:
    """Return a solver whose kernels are compiled; the same object for the same arguments."""
    library = pattern_library(num_groups, space)
    solver = Solver(library)
    for num_requests in (2, MAX_EXACT_REQUESTS + 1):
        blocks = np.arange(10.0, 10.0 + num_requests)
        weights = Weights(
            transfer_s=blocks * 1e-4,
            full_blocks=blocks,
            resident_blocks=blocks,
            offloaded_blocks=np.zeros(num_requests),
        )
        instance = make_instance(
            library,
            weights,
            compute_s=np.full(num_groups, 1e-3),
            capacity=0.6 * num_groups * float(blocks.sum()),
        )
        solver.solve(instance, NodeBudget(1_000), starts=[])
    return solver
