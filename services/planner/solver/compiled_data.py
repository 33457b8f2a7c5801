"""CVXPY's compiled map from parameters to the numbers of a linear program, applied cheaply.

A DPP problem compiles to one affine map, [parameters, 1] -> [A | b]. CVXPY applies all of it for
each solve, through sparse matrices. Here the rows that a plan can change are taken from that map
once, as arrays: every number is still CVXPY's.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from services.planner.solver.library import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledData:
    """The right-hand side and the last rows of A as functions of the parameters."""

    at: dict[int, slice]  # where each parameter's values are in the vector, by its CVXPY id
    size: int  # of the vector: all values in column-major order, and a 1
    b_used: Ints  # entries of the vector that b depends on
    b_map: Floats  # [rows, len(b_used)]
    tail_map: Any  # CSR [entries, size]: the entries of the last rows of A
    tail_at: tuple[Ints, Ints]  # row (counted from the first of the last ones) and column of each
    tail_shape: tuple[int, int]

    def vector(self, values: dict[int, Floats]) -> Floats:
        """Return the vector for parameter values by CVXPY id; what is not named is 0."""
        vector = np.zeros(self.size)
        vector[-1] = 1.0
        for name, value in values.items():
            vector[self.at[name]] = np.ravel(value, order="F")
        return vector

    def b(self, vector: Floats) -> Floats:
        """Return the right-hand sides of A x <= b; the first ones are equalities."""
        return np.asarray(self.b_map @ vector[self.b_used])

    def tail(self, vector: Floats) -> Floats:
        """Return the last rows of A."""
        rows = np.zeros(self.tail_shape)
        rows[self.tail_at] = self.tail_map @ vector
        return rows


def compiled_data(data: dict[str, Any], *, num_tail_rows: int) -> CompiledData:
    """Take the map from what `Problem.get_problem_data` returns.

    Raises RuntimeError if the map does not give the data it came with.
    """
    program = data["param_prob"]
    program.reduced_A.cache(False)
    entries = sparse.csr_matrix(program.reduced_A.reduced_mat)
    rows, starts, (num_rows, num_columns) = program.reduced_A.problem_data_index
    columns = np.repeat(np.arange(num_columns), np.diff(starts))
    in_b = columns == num_columns - 1
    b_map = np.zeros((num_rows, entries.shape[1]))
    b_map[rows[in_b]] = entries[in_b].toarray()
    used = np.flatnonzero(b_map.any(axis=0))
    in_tail = ~in_b & (rows >= num_rows - num_tail_rows)
    found = CompiledData(
        at={
            name: slice(program.param_id_to_col[name], program.param_id_to_col[name] + size)
            for name, size in program.param_id_to_size.items()
        },
        size=entries.shape[1],
        b_used=used,
        b_map=np.ascontiguousarray(b_map[:, used]),
        tail_map=-entries[in_tail],  # CVXPY's A x + b in the cone is -A x <= b
        tail_at=(rows[in_tail] - (num_rows - num_tail_rows), columns[in_tail]),
        tail_shape=(num_tail_rows, num_columns - 1),
    )
    _check(found, data)
    return found


def _check(found: CompiledData, data: dict[str, Any]) -> None:
    program = data["param_prob"]
    vector = found.vector({p.id: np.asarray(p.value) for p in program.parameters})
    tail = sparse.csr_matrix(data["A"])[-found.tail_shape[0] :].toarray()
    same = np.allclose(found.b(vector), data["b"]) and np.allclose(found.tail(vector), tail)
    if not same:
        raise RuntimeError("CVXPY's compiled map is not laid out as expected")
