"""Token-level SLOs over a decode window (OrbitFlow, section 3.3.1), with deposits.

A decode step is common to the whole batch. In a window of Delta steps request r's k-th token comes
after k steps, and by Token-Deposit's rule (`services.pacing`) the reader of r expects it at

    k * S_r + slack_r,    slack_r = max(0, deposited_r * S_r - age_r),

age_r being the time since the newest token was released. A token later than that is one violation,
and moves the reader's clock. For a constant step T > S_r the first late token is the first k with
k * (T - S_r) > slack_r, and every later one is late as well.

Where drafts are accepted a step brings a tokens: S_r is then a times the token's, and a late step
is one violation.

What a reader has lost before the window is lost under every plan: its clock starts anew with it.
Counted, it would leave a batch without a plan that keeps its SLO, and pause others for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.placement.types import PolicyParameters, RequestPhase, RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class PromisedPace:
    """What one reader expects of a window."""

    interval_s: float  # S_r > 0
    slack_s: float  # before the first token of the window is due, beyond S_r, >= 0

    def num_late(self, step_s: float, window: int) -> int:
        """Return how many of `window` tokens are late if every step takes `step_s`."""
        if step_s <= self.interval_s:
            return 0
        num_covered = min(self.slack_s / (step_s - self.interval_s), float(window))
        return window - math.floor(num_covered)


def promise_of(request: RequestState, *, deposit: bool) -> PromisedPace | None:
    """Return a request's promise, None if it has no SLO. Without `deposit` none is counted.

    While its prompt is computed a request promises nothing: no step brings it a token.
    """
    if request.slo_s is None or request.phase is RequestPhase.PREFILL:
        return None
    num_deposited = request.num_deposited_tokens if deposit else 0
    age_s = request.last_release_age_s or 0.0
    token_s = request.slo_s / request.tokens_per_step
    slack_s = max(0.0, num_deposited * token_s - age_s)
    return PromisedPace(interval_s=request.slo_s, slack_s=slack_s)


def violations_allowed(parameters: PolicyParameters, *, num_running: int, num_missed: int) -> float:
    """Return how many violations per step the running requests may have, on average.

    `alpha` of the paper, which applies only to batches larger than it; each paused request whose
    reader runs dry in the window uses up one.
    """
    if num_running + num_missed <= parameters.alpha:
        return 0.0
    return max(0.0, parameters.alpha - num_missed)


def constant_step_rate(promises: Sequence[PromisedPace], step_s: float, window: int) -> float:
    """Return violations per step, over `window` steps of `step_s` each.

    No sequence of steps that are all at least `step_s` has fewer: so a lower bound of the step
    that already breaks the SLO certifies that nothing keeps it.
    """
    return sum(promise.num_late(step_s, window) for promise in promises) / window


def late_tokens(promises: Sequence[PromisedPace], steps_s: Sequence[float]) -> list[int]:
    """Return the number of late tokens in each step of a window."""
    now_s = 0.0
    due_s = [promise.interval_s + promise.slack_s for promise in promises]
    late = []
    for step_s in steps_s:
        now_s += step_s
        late.append(sum(now_s > due for due in due_s))
        due_s = [
            max(now_s, due) + promise.interval_s
            for promise, due in zip(promises, due_s, strict=True)
        ]
    return late


def misses(promise: PromisedPace | None, *, window_s: float) -> bool:
    """Say whether a paused request's reader runs dry within `window_s`."""
    return promise is not None and promise.interval_s + promise.slack_s < window_s
