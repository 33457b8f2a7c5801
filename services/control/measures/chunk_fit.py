"""What a step takes more because it computes part of a prompt: a fixed part, and one per token."""

KEPT = 0.97  # of what was known, per step with a prompt
PRIOR_S_PER_TOKEN = 1e-4
PRIOR_WEIGHT = 4.0  # tokens squared, in thousands: forgotten after a few chunks


class ChunkFit:
    """Least squares with forgetting over (tokens of the chunk, seconds more)."""

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
