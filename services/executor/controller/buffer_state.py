"""What one reader was promised and has in hand, as the engine knows it."""

from services.pacing.deposit import ReaderModel, release_interval_s
from services.pacing.types import ServiceLevel


class BufferState:
    """Generated tokens are seen at once; delivered counts come late, the reader model between."""

    def __init__(self, service_level: ServiceLevel) -> None:
        self.service_level = service_level
        self._reader = ReaderModel(release_interval_s(service_level))
        self.num_generated = 0

    def generated(self, num_tokens: int, now_s: float) -> None:
        """Record tokens generated at `now_s`, not before earlier calls."""
        self.num_generated += num_tokens
        for _ in range(num_tokens):
            self._reader.generated(now_s)

    def delivered(self, num_delivered: int, at_s: float) -> None:
        """Take over a count that was true at `at_s`; a smaller one than known changes nothing."""
        self._reader.delivered(num_delivered, at_s)

    def num_deposited(self, now_s: float) -> int:
        """Return the tokens generated and not yet delivered, [0, num_generated]."""
        return self._reader.num_deposited(now_s)

    def delivered_age_sum_s(self, now_s: float) -> float:
        """Return the ages of delivered tokens, summed: the area under the delivery curve."""
        return self._reader.delivered_age_sum_s(now_s)

    def last_release_age_s(self, now_s: float) -> float | None:
        """Return the age of the newest token that has reached the reader; None before the first."""
        released_s = self._reader.last_release_s(now_s)
        return None if released_s is None else max(0.0, now_s - released_s)
