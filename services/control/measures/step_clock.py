"""How long engine steps take, seen from the scheduler."""

from collections import deque

MAX_STEPS_AHEAD = 8


class StepClock:
    """Times each step from its scheduling to its output, or from the output before if later.

    So a step that is scheduled while another runs is not charged for it.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.last_step_s = 0.0
        self._began_s: deque[float] = deque(maxlen=MAX_STEPS_AHEAD)
        self._ended_s = 0.0

    def begin(self, now_s: float) -> None:
        """Note that a step is being scheduled."""
        self._began_s.append(now_s)

    def end(self, now_s: float, *, ran: bool) -> float:
        """Note that the oldest step is over; steps in which no layer ran do not count.

        Returns since when it has been timed.
        """
        if not self._began_s:
            return now_s
        began_s = max(self._began_s.popleft(), self._ended_s)
        if ran:
            self.num_steps += 1
            self.last_step_s = now_s - began_s
        self._ended_s = now_s
        return began_s
