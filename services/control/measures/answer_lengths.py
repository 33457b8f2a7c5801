"""How long an answer will be, from the answers that have ended."""

from bisect import bisect_right
from collections import deque

NUM_REMEMBERED = 256
MEAN_KEPT = 0.95  # of what was known, per answer
LOW, HIGH = 0.1, 0.9  # quantiles of the predicted range


class AnswerLengths:
    """Lengths of recent answers; a range for a running one, given how long it is already."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=NUM_REMEMBERED)
        self._ordered: list[int] = []  # the same
        self._weight = self._sum = 0.0

    def ended(self, num_output_tokens: int) -> None:
        """Record an answer that the model ended, or its limit."""
        if num_output_tokens > 0:
            self._recent.append(num_output_tokens)
            self._ordered = sorted(self._recent)
            self._weight = MEAN_KEPT * self._weight + 1.0
            self._sum = MEAN_KEPT * self._sum + num_output_tokens

    @property
    def mean_tokens(self) -> float:
        """The length of answers of late; 0 before the first has ended."""
        return self._sum / self._weight if self._weight else 0.0

    def predict(self, *, num_output_tokens: int, max_tokens: int) -> tuple[int, int] | None:
        """Return the range of the whole answer's length, at least one token more than now.

        None if no answer so far was longer.
        """
        ordered = self._ordered
        first = bisect_right(ordered, num_output_tokens)
        last = len(ordered) - 1 - first
        if last < 0:
            return None
        low, high = ordered[first + int(LOW * last)], ordered[first + int(HIGH * last)]
        return min(low, max_tokens), min(high, max_tokens)
