"""The optimiser against enumeration and a mixed-integer program."""

import numpy as np
import pytest

from lab.planning.exhaustive import exhaustive
from lab.planning.instances import HARDWARE, realistic_instance
from services.placement.step_time.latency import Fetch, step_timing
from services.placement.step_time.patterns import PatternSpace
from services.placement.types import PlanStatus
from services.planner.solver.budget import NodeBudget
from services.planner.solver.instance import FORBIDDEN, Weights, make_instance, pool_blocks
from services.planner.solver.kernels.load import Board, load_of
from services.planner.solver.kernels.longest_path import critical_path
from services.planner.solver.kernels.step import objective_s, step_s
from services.planner.solver.library import pattern_library
from services.planner.solver.search import Incumbent, Problem
from services.planner.solver.solver import Solver
from tests.unit.placement.closed_forms import longest_path_s
from tests.unit.planner.milp import by_milp
from tests.unit.planner.small_instances import small_instance

pytestmark = pytest.mark.timeout(3_600)  # the first run compiles the kernels

UNLIMITED = 10**9
TINY = pattern_library(5, PatternSpace.FULL)
EVEN_9 = pattern_library(9, PatternSpace.EVEN)
SOLVERS = {library: Solver(library) for library in (TINY, EVEN_9)}


@pytest.mark.parametrize("library", [TINY, EVEN_9], ids=["full", "even"])
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_branch_and_bound_equals_enumeration(seed, library) -> None:
    solver, random = SOLVERS[library], np.random.default_rng(seed)
    statuses = set()
    for trial in range(120):
        num_requests = 1 + trial % (3 if trial % 5 == 0 else 2)
        instance = small_instance(random, library, num_requests)
        best = exhaustive(instance, library)
        found = solver.solve(instance, NodeBudget(UNLIMITED), starts=[])
        bound = solver.bound(instance).lower_bound_s
        statuses.add(found.status)

        assert found.objective_s == pytest.approx(best, rel=1e-9)
        assert (found.status is PlanStatus.INFEASIBLE) == (best == float("inf"))
        if best < float("inf"):
            assert bound <= best * (1 + 1e-9)
            first = solver.solve(instance, NodeBudget(0), starts=[])
            assert first.objective_s >= best * (1 - 1e-9)
            assert first.lower_bound_s <= best * (1 + 1e-9)
    assert statuses == {PlanStatus.OPTIMAL, PlanStatus.INFEASIBLE}


def test_the_mixed_integer_program_agrees() -> None:
    solver, random = SOLVERS[EVEN_9], np.random.default_rng(13)
    for trial in range(12):
        instance = small_instance(random, EVEN_9, 1 + trial % 4)
        found = solver.solve(instance, NodeBudget(UNLIMITED), starts=[])

        assert found.objective_s == pytest.approx(by_milp(instance, EVEN_9), rel=1e-6)


def test_kernels_equal_the_reference_model() -> None:
    random = np.random.default_rng(17)
    library = pattern_library(12, PatternSpace.FULL)
    row, mask = np.empty(library.num_patterns), np.empty(library.num_groups)
    for _ in range(100):
        instance = small_instance(random, library, 3)
        board = Board(instance, library.tables)
        choice = random.integers(0, library.num_patterns, 3)
        fetches = [
            Fetch(pattern=library.patterns[k], layer_s=tau)
            for k, tau in zip(choice, instance.transfer_s, strict=True)
        ]
        load = load_of(choice, board)
        expected = step_timing(instance.compute_s.tolist(), fetches).total_s

        assert step_s(load, board) == pytest.approx(expected)
        assert expected == pytest.approx(longest_path_s(instance.compute_s.tolist(), fetches))
        path_s = critical_path(load.mass, library.tables, instance.compute_s, row, mask)
        assert path_s == pytest.approx(expected)
        assert row @ load.mass + mask @ instance.compute_s == pytest.approx(expected)


def test_a_point_over_capacity_is_never_taken_over() -> None:
    random = np.random.default_rng(19)
    instance = small_instance(random, TINY, 3)
    bound = SOLVERS[TINY].bound(instance)
    resident = np.zeros(3, dtype=np.int64)
    used = pool_blocks(instance, resident)
    for capacity, taken in ((used, True), (used - 1, False)):
        tight = instance._replace(capacity=float(capacity))
        incumbent = Incumbent(Problem(instance=tight, library=TINY, bound=bound))

        assert incumbent.offer(resident) is taken
        assert (incumbent.choice is not None) is taken


def test_a_forbidden_pattern_is_never_chosen() -> None:
    random = np.random.default_rng(23)
    solver = SOLVERS[TINY]
    for _ in range(60):
        instance = small_instance(random, TINY, 2)
        allowed = random.random(instance.use.shape) < 0.4
        instance.use[~allowed] = FORBIDDEN
        found = solver.solve(instance, NodeBudget(UNLIMITED), starts=[])
        best = exhaustive(instance, TINY)

        assert found.objective_s == pytest.approx(best, rel=1e-9)
        if found.choice is not None:
            assert allowed[np.arange(2), found.choice].all()


@pytest.mark.parametrize("num_requests", [1, 4, 12])
def test_no_answer_is_worse_than_even_spacing_or_a_start(num_requests) -> None:
    library = pattern_library(32, PatternSpace.FULL)
    solver, random = Solver(library), np.random.default_rng(29)
    for _ in range(15):
        instance = realistic_instance(random, library, HARDWARE["8b-a5000"], num_requests)
        board = Board(instance, library.tables)
        start = random.integers(0, library.num_patterns, num_requests)
        rivals = [np.full(num_requests, column) for column in library.even] + [start]
        fitting = [
            objective_s(rival, board)
            for rival in rivals
            if pool_blocks(instance, rival) <= instance.capacity
        ]
        found = solver.solve(instance, NodeBudget(0), starts=[start])

        assert found.objective_s <= min(fitting, default=float("inf")) * (1 + 1e-12)
        assert found.lower_bound_s <= found.objective_s


def test_more_search_never_hurts_and_a_node_budget_repeats_exactly() -> None:
    library = pattern_library(32, PatternSpace.FULL)
    solver, random = Solver(library), np.random.default_rng(31)
    for num_requests in (3, 10):
        instance = realistic_instance(random, library, HARDWARE["8b-a5000"], num_requests)
        values = []
        for nodes in (0, 1_000, 5_000):
            budget = NodeBudget(nodes)
            found = solver.solve(instance, budget, starts=[], seed=5)
            again = solver.solve(instance, NodeBudget(budget.num_nodes), starts=[], seed=5)
            assert again.objective_s == found.objective_s
            assert again.status is found.status
            values.append(found.objective_s)
        assert values == sorted(values, reverse=True)


def test_requests_without_a_full_block_cost_their_compute_only() -> None:
    nothing = np.zeros(2)
    weights = Weights(
        transfer_s=nothing,
        full_blocks=nothing,
        resident_blocks=np.ones(2),
        offloaded_blocks=np.ones(2),
    )
    instance = make_instance(TINY, weights, compute_s=np.full(5, 2.0), capacity=10.0)
    found = SOLVERS[TINY].solve(instance, NodeBudget(0), starts=[])

    assert (found.status, found.step_s) == (PlanStatus.OPTIMAL, 10.0)
