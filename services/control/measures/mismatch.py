"""Whether steps take as long as predicted, for one composition of the batch."""

from collections import deque
from statistics import median

NUM_STEPS = 8  # whose median counts: a single slow step is noise
MIN_GAP_STEPS = 16  # between two alarms


class MismatchDetector:
    """Raises one alarm per deviation; the next needs agreement in between, or a new prediction."""

    def __init__(self, frac: float) -> None:
        """`frac`: how far measured and predicted may be apart; 0 for any distance."""
        self._frac = frac
        self._ratios: deque[float] = deque(maxlen=NUM_STEPS)
        self._armed = True
        self._num_quiet = MIN_GAP_STEPS  # steps since the last alarm

    def restart(self) -> None:
        """Forget measured steps: the batch or the prediction has changed."""
        self._ratios.clear()
        self._armed = True

    def add(self, *, measured_s: float, predicted_s: float) -> bool:
        """Take in one decode step; return whether the planner should know."""
        self._num_quiet += 1
        if not self._frac or predicted_s <= 0.0:
            return False
        self._ratios.append(measured_s / predicted_s)
        if len(self._ratios) < NUM_STEPS:
            return False
        deviation = abs(median(self._ratios) - 1.0)
        if deviation < self._frac / 2.0:
            self._armed = True
        if deviation <= self._frac or not self._armed or self._num_quiet < MIN_GAP_STEPS:
            return False
        self._armed, self._num_quiet = False, 0
        return True
