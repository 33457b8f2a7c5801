"""From prices to a placement: rounding, local search, branch and bound, large neighbourhoods."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.planner.solver.budget import Budget
from services.planner.solver.instance import Instance, pool_blocks
from services.planner.solver.kernels.load import ROOM, Board, add_all, new_load
from services.planner.solver.kernels.local_search import local_search
from services.planner.solver.kernels.rounding import best_uniform, deal_out, repair
from services.planner.solver.kernels.step import objective_s
from services.planner.solver.kernels.subtree import SearchFrame, search_subset
from services.planner.solver.library import Floats, Ints, PatternLibrary
from services.planner.solver.relaxation import Bound

NEIGHBOURHOOD = 5  # requests that are decided together
NEIGHBOURHOOD_NODES = 400
MAX_BARREN_NEIGHBOURHOODS = 120
SLICE_NODES = 500  # of branch and bound between two looks at the budget: about 0.1 ms
LOCAL_MOVES = 60  # evaluations of one local search in the first plan
PROVEN = 1e-9  # relative gap at which nothing better is looked for


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """What a search works on."""

    instance: Instance
    library: PatternLibrary
    bound: Bound

    @property
    def board(self) -> Board:
        return Board(self.instance, self.library.tables)

    @property
    def by_weight(self) -> Ints:
        """Requests, heaviest first."""
        return np.argsort(-self.instance.transfer_s, kind="stable")


class Incumbent:
    """The best placement found so far. Trusts no search: each offer is scored anew."""

    def __init__(self, problem: Problem) -> None:
        self._board = problem.board
        self.choice: Ints | None = None
        self.objective_s = float("inf")

    def offer(self, choice: Ints) -> bool:
        """Take over a choice that fits the pool and is better; returns whether it was."""
        instance = self._board.instance
        if pool_blocks(instance, choice) > instance.capacity * ROOM:
            return False
        value_s = objective_s(choice, self._board)
        if value_s >= self.objective_s:
            return False
        self.choice, self.objective_s = choice.copy(), value_s
        return True


def first_plans(problem: Problem, starts: Sequence[Ints], incumbent: Incumbent) -> None:
    """Offer what costs no search: even spacing, the given starts, the rounded relaxation."""
    library, board, prices = problem.library, problem.board, problem.bound.cost
    uniform = best_uniform(board, library.even)
    if uniform >= 0:
        incumbent.offer(np.full(problem.instance.num_requests, uniform))
    support = np.flatnonzero(problem.bound.shares > 1e-9)
    least = [int(np.argmin(library.tables.units))]
    columns = np.union1d(np.concatenate([library.even, library.extra]), support)
    columns = np.union1d(columns, least)
    for start in starts:
        repaired = start.copy()
        if repair(repaired, board, columns, prices):
            incumbent.offer(repaired)
    for allowed in (columns, library.even):
        rounded = _rounded(problem, allowed)
        if repair(rounded, board, allowed, prices):
            local_search(rounded, board, columns, LOCAL_MOVES)
            incumbent.offer(rounded)
    if incumbent.choice is not None:
        polished = incumbent.choice.copy()
        local_search(polished, board, columns, LOCAL_MOVES)
        incumbent.offer(polished)


def _rounded(problem: Problem, columns: Ints) -> Ints:
    """Give each request, heaviest first, the pattern with most of its share left."""
    left = problem.bound.shares[columns] * float(problem.instance.transfer_s.sum())
    choice = np.zeros(problem.instance.num_requests, dtype=np.int64)
    deal_out(problem.by_weight, problem.instance, columns, left, choice)
    return choice


def branch_and_bound(problem: Problem, columns: Ints, incumbent: Incumbent, budget: Budget) -> bool:
    """Search all placements over `columns`. Returns whether the search was completed."""
    search = _Subtree(problem, columns, problem.by_weight, incumbent)
    while not search.complete:
        if not budget.allows():
            return False
        budget.spend(search.run(SLICE_NODES))
    return True


def large_neighbourhoods(
    problem: Problem, columns: Ints, incumbent: Incumbent, budget: Budget, seed: int
) -> None:
    """Decide a few requests anew, again and again, the heavier ones more often."""
    random = np.random.default_rng(seed % 2**63)
    order = problem.by_weight
    heaviness = (1.0 + np.arange(len(order))) ** -0.7
    barren = 0
    while barren < MAX_BARREN_NEIGHBOURHOODS and not proven(problem, incumbent):
        if not budget.allows():
            return
        weight = heaviness + _regret(problem, incumbent)[order]
        keys = random.random(len(order)) ** (1.0 / weight)  # a weighted draw, none twice
        subset = order[np.sort(np.argsort(-keys, kind="stable")[:NEIGHBOURHOOD])]
        before = incumbent.objective_s
        budget.spend(_Subtree(problem, columns, subset, incumbent).run(NEIGHBOURHOOD_NODES))
        barren = 0 if incumbent.objective_s < before else barren + 1


def _regret(problem: Problem, incumbent: Incumbent) -> Floats:
    """Return how much each request pays above its cheapest priced pattern, the largest as 1."""
    assert incumbent.choice is not None
    cost = problem.bound.cost
    above: Floats = cost[np.arange(len(cost)), incumbent.choice] - cost.min(axis=1)
    return above / max(float(above.max()), 1e-300)


def proven(problem: Problem, incumbent: Incumbent) -> bool:
    """Say whether the incumbent meets the certified bound."""
    return incumbent.objective_s <= problem.bound.lower_bound_s * (1.0 + PROVEN)


class _Subtree:
    """A depth-first search over a subset of the requests, the others as in the incumbent."""

    def __init__(self, problem: Problem, columns: Ints, subset: Ints, incumbent: Incumbent) -> None:
        self._board, self._incumbent = problem.board, incumbent
        size, cost, use = len(subset), problem.bound.cost, problem.instance.use
        trial = np.full(problem.instance.num_requests, -1, dtype=np.int64)
        load = new_load(problem.library.num_patterns, problem.library.num_groups)
        base_s = problem.bound.base_s
        if incumbent.choice is not None and size < len(trial):
            fixed = np.ones(len(trial), dtype=bool)
            fixed[subset] = False
            others = np.flatnonzero(fixed)
            trial[others] = incumbent.choice[others]
            base_s += float(cost[others, trial[others]].sum())
            add_all(load, self._board, others, trial)
        sub = cost[np.ix_(subset, columns)]
        order = np.argsort(sub, axis=1, kind="stable")
        lightest = np.argsort(problem.library.tables.weight[columns], kind="stable")
        rest = np.zeros((size + 1, 2))
        rest[:size, 0] = np.cumsum(sub.min(axis=1)[::-1])[::-1]
        rest[:size, 1] = np.cumsum(use[np.ix_(subset, columns)].min(axis=1)[::-1])[::-1]
        self._frame = SearchFrame(
            subset=subset,
            columns=columns[order],
            cost=np.take_along_axis(sub, order, axis=1),
            rest=rest,
            path=np.zeros(size + 1, dtype=np.int64),
            bound=np.full(size + 1, base_s),
            depth=np.zeros(1, dtype=np.int64),
            last_columns=columns[lightest],
            last_cost=sub[-1, lightest],
            load=load,
            trial=trial,
            best=trial.copy(),
            value=np.array([incumbent.objective_s]),
        )

    @property
    def complete(self) -> bool:
        return bool(self._frame.depth[0] < 0)

    def run(self, quota: int) -> int:
        """Spend up to `quota` nodes and offer what they found."""
        nodes = search_subset(self._frame, self._board, quota)
        if self._frame.value[0] < self._incumbent.objective_s:
            self._incumbent.offer(self._frame.best)
        return max(nodes, 1)
