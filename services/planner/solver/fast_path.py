"""The relaxation on a HiGHS instance that lives as long as the process.

The numbers come from the CVXPY problem: its compiled data with the parameters of this plan
applied. Only what solving twice would repeat is saved: the rows that no parameter changes, and a
first basis.
"""

from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from services.planner.solver.compiled_data import compiled_data
from services.planner.solver.library import Floats
from services.planner.solver.program import NUM_SLOTS, Cuts, PlacementProgram, Relaxed, Shares

MAX_ITERATIONS = 100_000  # of the simplex; a program takes some tens


class SolverFailedError(Exception):
    """HiGHS ended without an optimal point."""


class FastPath:
    """Solves a `PlacementProgram`. Every solve starts from the same basis, so it keeps no state
    that changes an answer. Not thread-safe."""

    def __init__(self, program: PlacementProgram) -> None:
        self._program = program
        empty = Cuts(
            rows=np.zeros((0, program.library.num_patterns)),
            masks=np.zeros((0, program.library.num_groups)),
        )
        program.set(
            Shares(
                compute=np.full(program.library.num_groups, 0.1),
                capacity=float(program.library.num_groups),
            ),
            empty,
        )
        self._shares_at, self._theta_at = program.columns()
        data = program.compiled()
        self._data = compiled_data(data, num_tail_rows=NUM_SLOTS)
        self._highs = _new_highs()
        self._pass_static_rows(data)
        self._num_slot_rows = 0
        self._run()
        self._basis = self._highs.getBasis()

    def _pass_static_rows(self, data: dict[str, Any]) -> None:
        """Give HiGHS all rows but the slots, which are the last ones."""
        rows = sparse.csr_matrix(data["A"])
        self._num_equal = int(data["dims"].zero)
        self._num_rows = rows.shape[0] - NUM_SLOTS
        self._every_row = np.arange(self._num_rows, dtype=np.int32)
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = rows.shape[1], self._num_rows
        lp.col_cost_ = data["c"]
        lower, upper = data["lower_bounds"], data["upper_bounds"]
        lp.col_lower_ = np.full(rows.shape[1], -highspy.kHighsInf) if lower is None else lower
        lp.col_upper_ = np.full(rows.shape[1], highspy.kHighsInf) if upper is None else upper
        lp.row_lower_, lp.row_upper_ = self._row_bounds(data["b"][: self._num_rows])
        static = rows[: self._num_rows].tocsr()
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = static.indptr
        lp.a_matrix_.index_ = static.indices
        lp.a_matrix_.value_ = static.data
        self._highs.passModel(lp)

    def _row_bounds(self, b: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        lower = np.full(b.shape, -highspy.kHighsInf)
        lower[: self._num_equal] = b[: self._num_equal]
        return lower, np.asarray(b, dtype=np.float64)

    def solve(self, shares: Shares, extra: Cuts) -> Relaxed:
        """Solve with these parameters. Raises SolverFailedError."""
        vector = self._data.vector(self._program.values(shares, extra))
        b = self._data.b(vector)
        self._drop_slot_rows()
        lower, upper = self._row_bounds(b[: self._num_rows])
        self._highs.changeRowsBounds(self._num_rows, self._every_row, lower, upper)
        self._highs.clearSolver()
        self._highs.setBasis(self._basis)
        if len(extra):
            self._add_slot_rows(self._data.tail(vector)[: len(extra)], b[self._num_rows :])
        return self._run()

    def _drop_slot_rows(self) -> None:
        if self._num_slot_rows:
            first = self._num_rows
            doomed = np.arange(first, first + self._num_slot_rows, dtype=np.int32)
            self._highs.deleteRows(self._num_slot_rows, doomed)
            self._num_slot_rows = 0

    def _add_slot_rows(self, rows: Floats, b: Floats) -> None:
        count = len(rows)
        at_row, at_column = np.nonzero(rows)
        self._highs.addRows(
            count,
            np.full(count, -highspy.kHighsInf),
            b[:count],
            len(at_row),
            np.searchsorted(at_row, np.arange(count)).astype(np.int32),
            at_column.astype(np.int32),
            rows[at_row, at_column],
        )
        self._num_slot_rows = count

    def _run(self) -> Relaxed:
        self._highs.run()
        status = self._highs.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            raise SolverFailedError(self._highs.modelStatusToString(status))
        solution = self._highs.getSolution()
        point, duals = np.asarray(solution.col_value), -np.asarray(solution.row_dual)
        return Relaxed(
            shares=np.maximum(point[self._shares_at], 0.0),
            theta=float(point[self._theta_at]),
            cut_prices=np.maximum(duals[self._num_equal + 1 :], 0.0),
            capacity_price=max(float(duals[self._num_equal]), 0.0),
        )


def _new_highs() -> highspy.Highs:
    highs = highspy.Highs()
    for option, value in (
        ("output_flag", False),
        ("threads", 1),
        ("presolve", "off"),
        ("solver", "simplex"),
        ("simplex_iteration_limit", MAX_ITERATIONS),  # of one run; a time limit is of all runs
    ):
        highs.setOptionValue(option, value)
    return highs
