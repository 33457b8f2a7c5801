"""From prices to a placement: rounding, local search, branch and bound, large neighbourhoods."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.planner import kernels
from services.planner.budget import Budget
from services.planner.instance import Instance, pool_blocks
from services.planner.library import Floats, Ints, PatternLibrary
from services.planner.relaxation import Bound

MAX_EXACT_REQUESTS = 6  # above, branch and bound decides a few requests at a time
NEIGHBOURHOOD = 5  # requests that are decided together
NEIGHBOURHOOD_NODES = 400
MAX_BARREN_NEIGHBOURHOODS = 120
SLICE_NODES = 200  # of branch and bound between two looks at the budget: about 0.3 ms
LOCAL_MOVES = 60  # evaluations of one local search in the first plan
PROVEN = 1e-9  # relative gap at which nothing better is looked for


class Incumbent:
    """The best placement found so far. Trusts nobody: each offer is scored anew."""

    def __init__(self, instance: Instance, library: PatternLibrary) -> None:
        self._instance, self._library = instance, library
        self.choice: Ints | None = None
        self.objective_s = float("inf")

    def offer(self, choice: Ints) -> bool:
        """Take over a choice that fits the pool and is better; returns whether it was."""
        used = pool_blocks(self._instance, self._library.tables.offloaded, choice)
        if used > self._instance.capacity * kernels.ROOM:
            return False
        value, _ = kernels.objective_s(choice, self._instance, self._library.tables)
        if value >= self.objective_s:
            return False
        self.choice, self.objective_s = choice.copy(), value
        return True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """What a search works on."""

    instance: Instance
    library: PatternLibrary
    bound: Bound

    @property
    def by_weight(self) -> Ints:
        """Requests, heaviest first."""
        return np.argsort(-self.instance.transfer_s, kind="stable")


class RandomSource(Protocol):
    def random(self, size: int) -> Floats: ...


def first_plans(problem: Problem, starts: list[Ints], incumbent: Incumbent) -> None:
    """Offer what costs no search: even spacing, the given starts, the rounded relaxation."""
    instance, library = problem.instance, problem.library
    for column in library.even:
        incumbent.offer(np.full(instance.num_requests, column))
    support = np.flatnonzero(problem.bound.shares > 1e-9)
    columns = np.union1d(library.even, support)
    columns = np.union1d(columns, [int(np.argmin(library.tables.units))])
    for start in starts:
        repaired = start.copy()
        if kernels.repair(repaired, instance, library.tables, columns, problem.bound.cost):
            incumbent.offer(repaired)
    for allowed in (columns, library.even):
        rounded = _rounded(problem, allowed)
        if kernels.repair(rounded, instance, library.tables, allowed, problem.bound.cost):
            kernels.local_search(rounded, instance, library.tables, columns, LOCAL_MOVES)
            incumbent.offer(rounded)
    if incumbent.choice is not None:
        polished = incumbent.choice.copy()
        kernels.local_search(polished, instance, library.tables, columns, LOCAL_MOVES)
        incumbent.offer(polished)


def _rounded(problem: Problem, columns: Ints) -> Ints:
    """Give each request, heaviest first, the pattern with most of its share left."""
    left = problem.bound.shares[columns] * float(problem.instance.transfer_s.sum())
    choice = np.zeros(problem.instance.num_requests, dtype=np.int64)
    kernels.deal_out(problem.by_weight, problem.instance, columns, left, choice)
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
    problem: Problem, columns: Ints, incumbent: Incumbent, budget: Budget, random: RandomSource
) -> None:
    """Decide a few requests anew, again and again, the heavier ones more often."""
    order = problem.by_weight
    weight = 1.0 / (1.0 + np.arange(len(order))) ** 0.7
    barren = 0
    while barren < MAX_BARREN_NEIGHBOURHOODS and not proven(problem, incumbent):
        if not budget.allows():
            return
        keys = random.random(len(order)) ** (1.0 / weight)  # a weighted draw without replacement
        subset = order[np.sort(np.argsort(-keys, kind="stable")[:NEIGHBOURHOOD])]
        search = _Subtree(problem, columns, subset, incumbent)
        before = incumbent.objective_s
        budget.spend(search.run(NEIGHBOURHOOD_NODES))
        barren = 0 if incumbent.objective_s < before else barren + 1


def proven(problem: Problem, incumbent: Incumbent) -> bool:
    """Say whether the incumbent meets the certified bound."""
    return incumbent.objective_s <= problem.bound.lower_bound_s * (1.0 + PROVEN)


class _Subtree:
    """A depth-first search over a subset of the requests, the others as in the incumbent."""

    def __init__(self, problem: Problem, columns: Ints, subset: Ints, incumbent: Incumbent) -> None:
        self._instance, self._tables = problem.instance, problem.library.tables
        self._incumbent = incumbent
        size, cost = len(subset), problem.bound.cost
        present = incumbent.choice
        self._trial = np.full(problem.instance.num_requests, -1, dtype=np.int64)
        base_s = problem.bound.base_s
        if size < problem.instance.num_requests:
            assert present is not None
            others = np.setdiff1d(np.arange(len(present)), subset)
            self._trial[others] = present[others]
            base_s += float(cost[others, present[others]].sum())
        self._load = kernels.new_load(problem.library.num_patterns, problem.library.num_groups)
        for request in np.flatnonzero(self._trial >= 0):
            kernels.add(
                self._load, self._instance, self._tables, int(request), int(self._trial[request])
            )
        sub = cost[np.ix_(subset, columns)]
        order = np.argsort(sub, axis=1, kind="stable")
        rest = np.zeros((size + 1, 2))
        rest[:size, 0] = np.cumsum(sub.min(axis=1)[::-1])[::-1]
        rest[:size, 1] = np.cumsum(self._instance.use[np.ix_(subset, columns)].min(axis=1)[::-1])[
            ::-1
        ]
        self._frame = kernels.Frame(
            subset,
            columns[order],
            np.take_along_axis(sub, order, axis=1),
            rest,
            np.zeros(size + 1, dtype=np.int64),
            np.full(size + 1, base_s),
            np.zeros(1, dtype=np.int64),
        )

    @property
    def complete(self) -> bool:
        return bool(self._frame.depth[0] < 0)

    def run(self, quota: int) -> int:
        """Spend up to `quota` nodes and offer what they found."""
        best = self._trial.copy()
        value = np.array([self._incumbent.objective_s])
        nodes = kernels.search_subset(
            self._frame,
            self._load,
            self._instance,
            self._tables,
            self._trial,
            best,
            value,
            quota,
        )
        if value[0] < self._incumbent.objective_s:
            self._incumbent.offer(best)
        return max(nodes, 1)
