"""When a pause ends although no plan ends it.

Liveness must not hang on a planner: nobody is paused longer than `max_pause_s`, and a batch of
which nobody runs gets one of its requests back at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A running pause."""

    request_id: str
    age_s: float  # >= 0
    priority: int  # lower is served first


def pauses_to_end(pauses: Sequence[Pause], *, num_running: int, max_pause_s: float) -> list[str]:
    """Return whom to resume now.

    `num_running`: requests that the next step can serve, those waiting for their first step too.
    """
    ended = [pause.request_id for pause in pauses if pause.age_s >= max_pause_s]
    if not ended and not num_running and pauses:
        ended.append(max(pauses, key=lambda p: (-p.priority, p.age_s)).request_id)
    return ended
