"""What the scheduler knows of one request's reader: promise, progress, deposit."""

import math

from services.pacing.attainment import violates_delivered_tbt
from services.pacing.deposit import ReaderModel, release_interval_s
from services.pacing.types import ServiceLevel


class RequestBuffer:
    """Tokens of one request between the engine and its reader.

    Generation is seen at once, delivery when the gateway's counts arrive; between two counts the
    reader is assumed to take each token when it is due, or none while it is `on_hold`. All times
    are seconds on one clock.
    """

    def __init__(self, service_level: ServiceLevel) -> None:
        self.service_level = service_level
        self.interval_s = release_interval_s(service_level)  # 0: never held back
        self.num_generated = 0
        self.num_delivered = 0  # by the newest count
        self.num_late = 0  # generated later than S + epsilon after the previous token was due
        self.on_hold = False  # its reader has stopped
        self._reader = ReaderModel(self.interval_s)

    def generated(self, num_generated: int, now_s: float) -> None:
        """Take over how many tokens exist; those that are new were generated at `now_s`."""
        for _ in range(num_generated - self.num_generated):
            if self.interval_s and self._would_be_late(now_s):
                self.num_late += 1
            self._reader.generated(now_s)
        self.num_generated = max(num_generated, self.num_generated)

    def deliver(self, num_delivered: int, counted_s: float) -> None:
        """Take over how many tokens the reader had at `counted_s`, which may be a while ago.

        Smaller counts are older and mean nothing.
        """
        num_delivered = min(num_delivered, self.num_generated)
        if num_delivered >= self.num_delivered:
            self.num_delivered = num_delivered
            self._reader.delivered(num_delivered, counted_s)

    def num_deposited(self, now_s: float) -> int:
        """Return how many generated tokens the reader does not have yet."""
        if self.on_hold:
            return self.num_generated - self.num_delivered
        return self._reader.num_deposited(now_s)

    def slack_s(self, now_s: float) -> float:
        """Return how long until the reader lacks a token; < 0: so long it has waited already.

        Infinite before the first token.
        """
        last_due_s = self._reader.last_due_s
        return math.inf if last_due_s is None else last_due_s + self.interval_s - now_s

    def last_release_s(self, now_s: float) -> float | None:
        """Return when the newest token reached the reader; None before the first."""
        return self._reader.last_release_s(now_s)

    def delivered_age_sum_s(self, now_s: float) -> float:
        """Return the ages of delivered tokens, summed: the area under the delivery curve."""
        return self._reader.delivered_age_sum_s(now_s)

    def _would_be_late(self, now_s: float) -> bool:
        previous_due_s = self._reader.last_due_s
        if previous_due_s is None:
            return False
        return violates_delivered_tbt(now_s, previous_due_s, self.interval_s)
