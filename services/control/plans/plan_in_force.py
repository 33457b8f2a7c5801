"""How long the plan that was carried out last still holds."""

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
        """Return whether the plan has been void for long: nobody seems to make a newer one."""
        quality = self.plan.quality
        if quality is None:
            return False
        return step - self.asked_step >= quality.expires_after + overdue_steps
