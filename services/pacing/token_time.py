"""What the engine's time goes into between two tokens of a request, step by step.

A request is part of a step, or it is away for a reason. Of a step it was part of it waited for
copies and for other requests' prompts; what is left is its own. Its own time makes a token late
only where it alone is longer than the time to the token's turn.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from services.pacing.cause import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the engine, as it went."""

    begin_s: float
    end_s: float  # its tokens are there
    num_scheduled: Mapping[str, int]  # tokens to compute, by request; more than one: of its prompt
    stall_s: float = 0.0  # layers waited for copies, as far as is known
    stalled_by: Cause = Cause.COPIES


class TokenTime:
    """What one request has waited for since its newest token, or since it came."""

    def __init__(self, arrived_s: float) -> None:
        self._since_s = arrived_s
        self._waited_s: dict[Cause, float] = {}
        self._away: tuple[Cause, float] | None = (Cause.QUEUE, arrived_s)  # why, and since when

    def leave(self, cause: Cause, now_s: float) -> None:
        """Note that the request is part of no step until `run`."""
        self._away = (cause, now_s)

    def run(self, step: Step, *, prompts_s: float, prompt_s: float) -> None:
        """Note that it was part of a step, in which other requests' prompts took `prompts_s`, and
        what was missing of its own `prompt_s`.
        """
        if self._away is not None:
            cause, since_s = self._away
            self._away = None
            self._wait(cause, step.begin_s - max(since_s, self._since_s))
        self._wait(step.stalled_by, min(step.stall_s, step.end_s - step.begin_s))
        self._wait(Cause.PROMPTS, prompts_s)
        if Cause.PAUSE in self._waited_s:
            self._wait(Cause.PAUSE, prompt_s)  # it had been there before

    def _wait(self, cause: Cause, seconds: float) -> None:
        if seconds > 0.0:
            self._waited_s[cause] = self._waited_s.get(cause, 0.0) + seconds

    def token(self, now_s: float) -> None:
        """Note that there is a new token."""
        self._since_s = now_s
        self._waited_s.clear()

    def cause(self, now_s: float, turn_s: float) -> Cause:
        """Return what most of the time went into, for a token that comes now, after its turn."""
        blamed_s = self._waited_s.copy()
        own_s = now_s - self._since_s - sum(blamed_s.values())
        excess_s = max(0.0, own_s - (turn_s - self._since_s))
        blamed_s[Cause.PLANNER] = blamed_s.get(Cause.PLANNER, 0.0) + excess_s
        return max(blamed_s, key=lambda cause: blamed_s[cause])
