"""The relaxation: CVXPY's model of record and the fast path on its compiled data."""

import numpy as np
import pytest

from services.placement.step_time.patterns import PatternSpace
from services.planner.solver.compiled_data import compiled_data
from services.planner.solver.fast_path import FastPath
from services.planner.solver.kernels.longest_path import critical_path
from services.planner.solver.library import pattern_library
from services.planner.solver.program import (
    NUM_SLOTS,
    Cuts,
    PlacementProgram,
    Shares,
    no_stall_cut,
)
from services.planner.solver.relaxation import Relaxation, distinct, joined, no_cuts

pytestmark = pytest.mark.timeout(3_600)  # the first run compiles the kernels

LIBRARY = pattern_library(9, PatternSpace.FULL)


def random_shares(random: np.random.Generator) -> Shares:
    compute = random.uniform(0.01, 0.5) * random.uniform(0.5, 1.5, LIBRARY.num_groups)
    return Shares(compute=compute, capacity=float(random.uniform(2.0, LIBRARY.num_groups)))


def random_paths(random: np.random.Generator, count: int) -> Cuts:
    """Return longest paths of random loads."""
    found = no_cuts(LIBRARY)
    row, mask = np.empty(LIBRARY.num_patterns), np.empty(LIBRARY.num_groups)
    for _ in range(count):
        mass = random.random(LIBRARY.num_patterns) * (random.random(LIBRARY.num_patterns) < 0.2)
        compute = random.uniform(0.01, 0.3) * np.ones(LIBRARY.num_groups)
        critical_path(mass, LIBRARY.tables, compute, row, mask)
        found = joined(found, Cuts(rows=row[None].copy(), masks=mask[None].copy()))
    return found


def test_the_program_is_disciplined_parametrised() -> None:
    program = PlacementProgram(LIBRARY, no_stall_cut(LIBRARY))

    assert program.problem.is_dcp(dpp=True)


def test_the_compiled_map_gives_what_cvxpy_gives() -> None:
    random = np.random.default_rng(11)
    pool = distinct(joined(no_stall_cut(LIBRARY), random_paths(random, 6)))
    program = PlacementProgram(LIBRARY, pool)
    program.set(random_shares(random), no_cuts(LIBRARY))
    found = compiled_data(program.compiled(), num_tail_rows=NUM_SLOTS)
    for count in (0, 1, 5, NUM_SLOTS):
        shares, extra = random_shares(random), random_paths(random, count)
        program.set(shares, extra)
        record = program.compiled()
        vector = found.vector(program.values(shares, extra))

        assert found.b(vector) == pytest.approx(record["b"], abs=1e-12)
        assert found.tail(vector) == pytest.approx(record["A"].toarray()[-NUM_SLOTS:], abs=1e-12)


def test_a_map_that_does_not_give_its_own_data_is_refused() -> None:
    program = PlacementProgram(LIBRARY, no_stall_cut(LIBRARY))
    program.set(random_shares(np.random.default_rng(1)), no_cuts(LIBRARY))
    data = program.compiled()

    with pytest.raises(RuntimeError, match="laid out"):
        compiled_data(data | {"b": data["b"] + 1.0}, num_tail_rows=NUM_SLOTS)


def test_the_fast_path_equals_cvxpy() -> None:
    random = np.random.default_rng(3)
    pool = distinct(joined(no_stall_cut(LIBRARY), random_paths(random, 6)))
    program = PlacementProgram(LIBRARY, pool)
    fast = FastPath(program)
    for trial in range(40):
        shares, extra = random_shares(random), random_paths(random, trial % (NUM_SLOTS + 1))
        quick = fast.solve(shares, extra)
        program.set(shares, extra)
        record = program.solve(len(extra))

        assert quick.theta == pytest.approx(record.theta, rel=1e-9, abs=1e-9)
        assert quick.shares.sum() == pytest.approx(1.0, abs=1e-9)
        assert quick.cut_prices.sum() == pytest.approx(1.0, abs=1e-6)


def test_an_answer_does_not_depend_on_what_was_solved_before() -> None:
    random = np.random.default_rng(5)
    pool = distinct(joined(no_stall_cut(LIBRARY), random_paths(random, 6)))
    problems = [(random_shares(random), random_paths(random, n)) for n in (0, 3, 1, 0, 8)]
    used = FastPath(PlacementProgram(LIBRARY, pool))
    first = [used.solve(*problem) for problem in problems]
    for problem, before in zip(reversed(problems), reversed(first), strict=True):
        fresh = FastPath(PlacementProgram(LIBRARY, pool)).solve(*problem)
        again = used.solve(*problem)
        for other in (fresh, again):
            assert np.array_equal(other.shares, before.shares)
            assert np.array_equal(other.cut_prices, before.cut_prices)
            assert other.capacity_price == before.capacity_price


def test_the_pool_is_the_same_each_time_and_its_cuts_are_paths() -> None:
    one, other = Relaxation(LIBRARY).pool, Relaxation(LIBRARY).pool

    assert np.array_equal(one.rows, other.rows)
    assert np.array_equal(one.masks, other.masks)
    # No load is faster than any path says: theta >= A_p w + M_p comp.
    random = np.random.default_rng(7)
    row, mask = np.empty(LIBRARY.num_patterns), np.empty(LIBRARY.num_groups)
    for _ in range(50):
        mass = random.random(LIBRARY.num_patterns)
        compute = random.random(LIBRARY.num_groups)
        length = critical_path(mass, LIBRARY.tables, compute, row, mask)
        assert (one.rows @ mass + one.masks @ compute).max() <= length * (1 + 1e-12)


def test_a_program_does_not_age() -> None:
    """HiGHS counts the time of all its runs together against a time limit."""
    program = PlacementProgram(LIBRARY, no_stall_cut(LIBRARY))
    highs = FastPath(program)._highs

    _, limit_s = highs.getOptionValue("time_limit")
    assert limit_s == float("inf")
    _, max_iterations = highs.getOptionValue("simplex_iteration_limit")
    assert max_iterations > 100 * highs.getInfo().simplex_iteration_count > 0
