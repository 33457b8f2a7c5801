"""What one request's reader has got so far, whether it came in time, and why not."""

from collections import defaultdict
from collections.abc import Sequence

from services.gateway import metrics
from services.gateway.live.pacer import DueToken
from services.gateway.metrics import Slo
from services.gateway.types import Delivery, GenerationRequest
from services.pacing.attainment import meets_tpot, violates_delivered_tbt
from services.pacing.cause import Cause, cause_of
from services.pacing.reading import Reading, effective_tokens


class DeliveryRecord:
    """Counts written tokens and measures their times against what the reader was promised.

    The times of a whole answer's tokens mean nothing to its reader: they are only counted.
    """

    def __init__(self, request: GenerationRequest, *, interval_s: float, arrived_s: float) -> None:
        """`arrived_s` is when the request came in, `interval_s` the release interval S >= 0."""
        self._level = request.service_level
        self._is_timed = request.delivery is Delivery.STREAMED
        self._reading = Reading(interval_s)
        self._arrived_s = arrived_s
        self.ttft_s: float | None = None  # known once the first token was written, if it is timed
        self._first_written_s = 0.0
        self._last_written_s = 0.0
        self._last_due_s = 0.0
        self.num_written = 0
        self.num_late = 0
        self._waited_s = dict.fromkeys(Cause, 0.0)
        # Tokens by how many before them were not due.
        self._num_in_hand: defaultdict[int, int] = defaultdict(int)

    def generated(self, num_tokens: int, num_held: int) -> None:
        """Note that so many tokens came in, with which `num_held` are not due."""
        if num_held <= 1:  # none before any of them
            self._num_in_hand[0] += num_tokens
            return
        for number in range(num_held - num_tokens, num_held):
            self._num_in_hand[number if number > 0 else 0] += 1

    def written(self, tokens: Sequence[DueToken], now_s: float, there_s: float) -> None:
        """Note that `tokens` were handed to the client at `now_s`, which might have been at
        `there_s` or when they were due, had the client taken them.
        """
        metrics.DELIVERED.num_written += len(tokens)
        if not self._is_timed:
            self.num_written += len(tokens)
            return
        for token in tokens:
            if self.num_written:
                self._note_gap(token, now_s, there_s)
            else:
                self._note_first(token, now_s, there_s)
            self._last_written_s, self._last_due_s = now_s, token.due_s
            self.num_written += 1

    def finish(self) -> None:
        """Note that the last token was written."""
        metrics.DELIVERED.num_effective += effective_tokens(self._num_in_hand)
        if not self._is_timed or self.num_written < 2:
            return
        elapsed_s, num_gaps = self._last_written_s - self._first_written_s, self.num_written - 1
        metrics.TPOT_SECONDS.observe(elapsed_s / num_gaps)
        interval_s = self._reading.interval_s
        if interval_s:
            is_met = meets_tpot(elapsed_s, num_gaps, interval_s)
            metrics.PACED_REQUESTS.labels("met" if is_met else "missed").inc()
        slo_s = self._level.slo_tpot_s
        if slo_s is not None and not meets_tpot(elapsed_s, num_gaps, slo_s):
            self._waited_s[Cause.READER] += num_gaps * max(0.0, interval_s - slo_s)
            cause = max(Cause, key=lambda one: self._waited_s[one])
            metrics.DELIVERED.note_miss(Slo.TPOT, cause)

    def _note_first(self, token: DueToken, now_s: float, there_s: float) -> None:
        self._first_written_s = now_s
        ttft_s = self.ttft_s = now_s - self._arrived_s
        metrics.TTFT_SECONDS.observe(ttft_s)
        if self._reading.interval_s:
            self._reading.took(now_s)
            metrics.DELIVERED.num_missed += ttft_s / self._reading.interval_s
        late_s = ttft_s - (self._level.slo_ttft_s or ttft_s)
        if late_s > 0.0:
            metrics.DELIVERED.note_miss(Slo.TTFT, _cause(token, late_s, now_s, there_s))

    def _note_gap(self, token: DueToken, now_s: float, there_s: float) -> None:
        delivered, interval_s = metrics.DELIVERED, self._reading.interval_s
        delivered.note_gap(now_s - self._last_written_s)
        if not interval_s:
            return
        delivered.num_paced += 1
        delivered.reading_s += interval_s
        waited_s = self._reading.took(now_s)
        is_late = violates_delivered_tbt(now_s, self._last_due_s, interval_s)
        if not waited_s and not is_late:
            return
        late_s = max(waited_s, now_s - self._last_due_s - interval_s)
        cause = _cause(token, late_s, now_s, there_s)
        self._waited_s[cause] += waited_s
        delivered.rebuffering_s[cause] += waited_s
        delivered.num_missed += waited_s / interval_s
        if is_late:
            self.num_late += 1
            delivered.note_miss(Slo.TBT, cause)


def _cause(token: DueToken, late_s: float, now_s: float, there_s: float) -> Cause:
    """Return why a token is late that was written at `now_s`, and might have been at `there_s`."""
    reader_s = now_s - max(there_s, token.due_s)
    return cause_of(late_s, delay=token.token.delay, reader_s=reader_s)
