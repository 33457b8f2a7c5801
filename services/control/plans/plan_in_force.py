"""How long the plan that was carried out last still holds, and pauses that no plan ends."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.control.types import Trigger
from services.placement.types import Plan


@dataclass(slots=True, kw_only=True)
class PlanInForce:
    """One plan's clock. Steps count from the snapshot that it answers."""

    plan: Plan
    asked_step: int
    _window_ended: bool = False
    _expired: bool = False

    def triggers_at(self, step: int) -> list[Trigger]:
        """Return what becomes due at `step`, each once.

        The window's end comes a step early, so that the next plan is there in time.
        """
        quality = self.plan.quality
        if quality is None:
            return []  # it predicts nothing
        age = step - self.asked_step
        due = []
        if age >= quality.window - 1 and not self._window_ended:
            self._window_ended = True
            due.append(Trigger.WINDOW_END)
        if age >= quality.expires_after and not self._expired:
            self._expired = True
            due.append(Trigger.EXPIRED)
        return due

    def is_overdue(self, step: int, *, overdue_steps: int) -> bool:
        """Return whether the plan has been void for long: no planner seems to make a newer one."""
        quality = self.plan.quality
        if quality is None:
            return False
        return step - self.asked_step >= quality.expires_after + overdue_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A running pause."""

    request_id: str
    age_s: float  # >= 0
    priority: int  # lower is served first


def pauses_to_end(pauses: Sequence[Pause], *, num_running: int, max_pause_s: float) -> list[str]:
    """Return which requests to resume now: liveness must not hang on a planner.

    No request is paused longer than `max_pause_s`, and a batch of which none runs gets one of its
    requests back at once.

    `num_running`: requests that the next step can serve, those waiting for their first step too.
    """
    ended = [pause.request_id for pause in pauses if pause.age_s >= max_pause_s]
    if not ended and not num_running and pauses:
        ended.append(max(pauses, key=lambda p: (-p.priority, p.age_s)).request_id)
    return ended
