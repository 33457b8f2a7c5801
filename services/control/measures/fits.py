"""Least squares over a stream of samples, which forget."""

from itertools import chain, combinations

import numpy as np

FORGETTING = 0.999  # per sample: what was measured a thousand steps ago counts a third
RIDGE = 1e-9  # relative; keeps a batch that never changes from dividing by zero
WORTH = 1e-3  # share of the spread that one more coefficient must explain
ROUNDING = 1e-9  # relative; a smaller error is none

Coefficients = tuple[float, float, float]


class NonNegativeFit:
    """y = a + b u + c v with a > 0 and b, c >= 0.

    Keeps sums only; solving takes some 0.1 ms and is left to the caller's choice of moment.

    A batch that hardly varies cannot tell the coefficients apart: the fewest that explain it win.
    """

    def __init__(self) -> None:
        self._sums = np.zeros((4, 4))  # of the products of 1, u, v and y; every step adds to them
        self._xx, self._xy = self._sums[:3, :3], self._sums[:3, 3]

    def add(self, u: float, v: float, y: float) -> None:
        row = np.array((1.0, u, v, y))
        self._sums *= FORGETTING
        self._sums += row[:, np.newaxis] * row

    def solve(self) -> Coefficients:
        """Return (a, b, c); (0, 0, 0) before the first sample."""
        best, best_error = (0.0, 0.0, 0.0), float("inf")
        optional = chain.from_iterable(combinations((1, 2), n) for n in range(3))
        for chosen in optional:
            columns = [0, *chosen]
            found = self._solve(columns)
            if found is None:
                continue
            error = max(0.0, self._error(found))
            if error < best_error - WORTH * self._spread() - ROUNDING * self._yy:
                best, best_error = (found[0], found[1], found[2]), error
        return best

    def _solve(self, columns: list[int]) -> list[float] | None:
        """Return the coefficients with only `columns` in use; None if one is negative."""
        xx = self._xx[np.ix_(columns, columns)]
        if xx[0, 0] <= 0.0:
            return None
        ridge = np.diag(RIDGE * np.diag(xx) + 1e-30)
        solution = np.linalg.solve(xx + ridge, self._xy[columns])
        if solution.min() < 0.0:
            return None
        found = [0.0, 0.0, 0.0]
        for column, value in zip(columns, solution, strict=True):
            found[column] = float(value)
        return found

    @property
    def _yy(self) -> float:
        return float(self._sums[3, 3])

    def _error(self, coefficients: list[float]) -> float:
        x = np.array(coefficients)
        return float(self._yy - 2.0 * x @ self._xy + x @ self._xx @ x)

    def _spread(self) -> float:
        """Return the squared deviation of y from its mean."""
        return max(0.0, float(self._yy - self._xy[0] ** 2 / self._xx[0, 0]))


KEPT = 0.97  # of what was known, per step with a prompt
PRIOR_S_PER_TOKEN = 1e-4
PRIOR_WEIGHT = 4.0  # tokens squared, in thousands: forgotten after a few chunks


class ChunkFit:
    """What a step takes more because it computes part of a prompt: a fixed part, and one per token.

    Over (tokens of the chunk, seconds more).
    """

    def __init__(self) -> None:
        self._n = self._x = self._y = 0.0
        self._xx = 1e3 * PRIOR_WEIGHT
        self._xy = PRIOR_S_PER_TOKEN * self._xx

    def add(self, num_tokens: int, extra_s: float) -> None:
        """Take in one step. `extra_s`: beyond a step that only decodes, >= 0."""
        self._n = KEPT * self._n + 1.0
        self._x = KEPT * self._x + num_tokens
        self._y = KEPT * self._y + extra_s
        self._xx = KEPT * self._xx + num_tokens * num_tokens
        self._xy = KEPT * self._xy + num_tokens * extra_s

    def solve(self) -> tuple[float, float]:
        """Return seconds whatever the chunk, and seconds per token; both 0 before the first."""
        if not self._n:
            return 0.0, 0.0
        spread = self._xx - self._x * self._x / self._n
        slope = (self._xy - self._x * self._y / self._n) / spread if spread > 0.0 else 0.0
        base = (self._y - slope * self._x) / self._n
        if slope <= 0.0 or base < 0.0:  # a line through the origin says all there is
            return 0.0, max(1e-9, self._xy / self._xx)
        return base, slope
