"""What one request's reader has got so far, and whether it came in time."""

from collections.abc import Sequence

from services.gateway import metrics
from services.gateway.live.pacer import DueToken
from services.gateway.types import Delivery, GenerationRequest
from services.pacing.attainment import violates_delivered_tbt


class DeliveryRecord:
    """Counts written tokens and measures their times against what the reader was promised.

    The times of a whole answer's tokens mean nothing to its reader: they are only counted.
    """

    def __init__(self, request: GenerationRequest, *, interval_s: float, arrived_s: float) -> None:
        """`arrived_s` is when the request came in, `interval_s` the release interval S >= 0."""
        self._level = request.service_level
        self._is_timed = request.delivery is Delivery.STREAMED
        self._interval_s = interval_s
        self._arrived_s = arrived_s
        self.ttft_s: float | None = None  # known once the first token was written, if it is timed
        self._first_written_s = 0.0
        self._last_written_s = 0.0
        self._last_due_s = 0.0
        self.num_written = 0
        self.num_late = 0

    def written(self, tokens: Sequence[DueToken], now_s: float) -> None:
        """Note that `tokens` were handed to the client at `now_s`."""
        metrics.DELIVERED.num_written += len(tokens)
        if not self._is_timed:
            self.num_written += len(tokens)
            return
        for token in tokens:
            if self.num_written:
                self._note_gap(token, now_s)
            else:
                self._note_first(now_s)
            self._last_written_s, self._last_due_s = now_s, token.due_s
            self.num_written += 1

    def finish(self) -> None:
        """Note that the last token was written."""
        if not self._is_timed or self.num_written < 2:
            return
        elapsed_s = self._last_written_s - self._first_written_s
        mean_s = elapsed_s / (self.num_written - 1)
        metrics.TPOT_SECONDS.observe(mean_s)
        if self._level.slo_tpot_s is not None and mean_s > self._level.slo_tpot_s:
            metrics.SLO_VIOLATIONS.labels("tpot").inc()

    def _note_first(self, now_s: float) -> None:
        self._first_written_s = now_s
        ttft_s = self.ttft_s = now_s - self._arrived_s
        metrics.TTFT_SECONDS.observe(ttft_s)
        if self._level.slo_ttft_s is not None and ttft_s > self._level.slo_ttft_s:
            metrics.SLO_VIOLATIONS.labels("ttft").inc()

    def _note_gap(self, token: DueToken, now_s: float) -> None:
        metrics.DELIVERED.note_gap(now_s - self._last_written_s)
        if not self._interval_s:
            return
        metrics.DELIVERED.num_paced += 1
        metrics.DELIVERED.reading_s += self._interval_s
        if violates_delivered_tbt(now_s, self._last_due_s, self._interval_s):
            self.num_late += 1
            metrics.DELIVERED.num_late += 1
            metrics.DELIVERED.rebuffering_s += now_s - self._last_due_s - self._interval_s
