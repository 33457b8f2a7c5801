"""What one request's reader has got so far, whether it came in time, and why not."""

import math
from collections import defaultdict
from collections.abc import Sequence

from services.gateway import metrics
from services.gateway.live.pacer import DueToken
from services.gateway.metrics import Slo
from services.gateway.request_class import class_of
from services.gateway.types import Delivery, GenerationRequest
from services.pacing.attainment import meets_tpot, violates_delivered_tbt
from services.pacing.cause import Cause, cause_of
from services.pacing.deposit import max_held_s, release_interval_s
from services.pacing.reading import Reading, effective_tokens
from services.pacing.types import Release, ServiceLevel


class DeliveryRecord:
    """Counts written tokens and measures their times against what the reader was promised.

    The times of a whole answer's tokens mean nothing to its reader: they count for its class only.
    """

    def __init__(self, request: GenerationRequest, *, interval_s: float, arrived_s: float) -> None:
        """`arrived_s` is when the request came in, `interval_s` the release interval S >= 0."""
        self._level = request.service_level
        self._is_paced = max_held_s(request.service_level) == math.inf
        self._is_timed = request.delivery is Delivery.STREAMED
        self._num_had = request.num_delivered_tokens  # that the client had before
        self._reading = Reading(interval_s)
        self._arrived_s = arrived_s
        self._class = class_of(request)
        self.ttft_s: float | None = None  # known once the first token was written, if it is timed
        # To the first that is of the answer, text or a call; no thought is.
        self.ttfat_s: float | None = None
        self._num_before = 0  # tokens that were written before that
        self._last_written_s = 0.0  # 0: nothing was
        self._last_due_s = 0.0  # of the newest token that is read, by its reader's pace
        self._longest_gap_s = 0.0  # in the answer
        self._longest_wait_s = 0.0  # after the first token, beyond its reader's pace
        self.num_written = 0
        self.num_late = 0
        self._waited_s = dict.fromkeys(Cause, 0.0)
        # Tokens by how many before them were not due.
        self._num_in_hand: defaultdict[int, int] = defaultdict(int)

    def repace(self, level: ServiceLevel) -> None:
        """Measure against other promises from now on."""
        self._level, self._reading.interval_s = level, release_interval_s(level)

    def generated(self, num_tokens: int, num_held: int, now_s: float) -> None:
        """Note that so many tokens came in, with which `num_held` are not due."""
        if not self._is_paced:
            num_held += self._reading.num_in_hand(now_s)
        if num_held <= 1:  # none before any of them
            self._num_in_hand[0] += num_tokens
            return
        for number in range(num_held - num_tokens, num_held):
            self._num_in_hand[number if number > 0 else 0] += 1

    def written(self, tokens: Sequence[DueToken], now_s: float, there_s: float) -> None:
        """Note that `tokens` were handed to the client at `now_s`, which might have been at
        `there_s` or when they were due, had the client taken them.
        """
        metrics.DELIVERED.num_written[self._class] += len(tokens)
        if not self._last_written_s:
            metrics.CLASS_TTFT_SECONDS.labels(self._class.value).observe(now_s - self._arrived_s)
        elif not self._reading.interval_s:
            self._longest_wait_s = max(self._longest_wait_s, now_s - self._last_written_s)
        if not self._is_timed:
            self._last_written_s = now_s
            self.num_written += len(tokens)
            return
        for due in tokens:
            token = due.token
            if self.num_written:
                self._note_gap(now_s - self._last_written_s)
            else:
                self.ttft_s = now_s - self._arrived_s
                metrics.TTFT_SECONDS.observe(self.ttft_s)
            if self.ttfat_s is None and (token.text or token.tool_calls):
                self._note_answer(due, now_s, there_s)
            if token.is_read and self._reading.interval_s:
                self._note_turn(due, now_s, there_s)
            self._last_written_s = now_s
            self.num_written += 1

    def finish(self) -> None:
        """Note that the last token was written."""
        metrics.DELIVERED.num_effective += effective_tokens(self._num_in_hand)
        metrics.CLASS_WAIT_SECONDS.labels(self._class.value).observe(self._longest_wait_s)
        num_gaps = self.num_written - self._num_before - 1
        if self.ttfat_s is None or num_gaps < 1:
            return
        elapsed_s = self._last_written_s - self._arrived_s - self.ttfat_s
        metrics.TPOT_SECONDS.observe(elapsed_s / num_gaps)
        metrics.LONGEST_GAP_SECONDS.labels(self._release).observe(self._longest_gap_s)
        interval_s = self._reading.interval_s
        if self._reading.num_gaps:
            is_met = meets_tpot(elapsed_s, num_gaps, interval_s)
            metrics.PACED_REQUESTS.labels("met" if is_met else "missed").inc()
        slo_s = self._level.slo_tpot_s
        if slo_s is not None and not meets_tpot(elapsed_s, num_gaps, slo_s):
            self._waited_s[Cause.READER] += num_gaps * max(0.0, interval_s - slo_s)
            cause = max(Cause, key=lambda one: self._waited_s[one])
            metrics.DELIVERED.note_miss(Slo.TPOT, cause)

    def left(self, num_kept: int, now_s: float) -> None:
        """Note that the reader left, before the last `num_kept` tokens that are there."""
        if self._reading.turn_s is None:
            return
        num_unread = self._reading.num_in_hand(now_s)
        num_there = self._reading.num_gaps + 1
        metrics.UNREAD_TOKENS.inc(num_unread)
        metrics.READ_FRAC.observe((num_there - num_unread) / (num_there + num_kept))

    def forget(self) -> None:
        """Begin again without any token: those of a whole answer, which its reader has not got."""
        self.num_written = 0

    @property
    def num_delivered(self) -> int:
        """Return how many tokens of the answer the reader has, however it got them."""
        return self._num_had + self.num_written

    @property
    def runs_dry_s(self) -> float:
        """Return when the reader will have read all that was written; -inf: nothing is read."""
        turn_s = self._reading.turn_s
        return -math.inf if turn_s is None else turn_s + self._reading.interval_s

    @property
    def _release(self) -> str:
        """Name what keeps tokens back, or does not."""
        if not self._reading.interval_s:
            return "unpaced"
        return (self._level.release or Release.PACED).value

    def _note_gap(self, gap_s: float) -> None:
        metrics.DELIVERED.note_gap(gap_s)
        if self.ttfat_s is not None and gap_s > self._longest_gap_s:
            self._longest_gap_s = gap_s

    def _note_answer(self, token: DueToken, now_s: float, there_s: float) -> None:
        """Note the first token of the answer: it is what the bound of the first token is on."""
        self._num_before = self.num_written
        ttfat_s = self.ttfat_s = now_s - self._arrived_s
        metrics.TTFAT_SECONDS.observe(ttfat_s)
        late_s = ttfat_s - (self._level.slo_ttft_s or ttfat_s)
        if late_s > 0.0:
            metrics.DELIVERED.note_miss(Slo.TTFT, _cause(token, late_s, now_s, there_s))

    def _note_turn(self, token: DueToken, now_s: float, there_s: float) -> None:
        """Note a token that is read, at a pace."""
        delivered, interval_s = metrics.DELIVERED, self._reading.interval_s
        is_first = self._reading.turn_s is None
        waited_s = self._reading.took(now_s)
        self._longest_wait_s = max(self._longest_wait_s, waited_s)
        previous_due_s = self._last_due_s
        self._last_due_s = token.due_s if self._is_paced else self._reading.turn_s or now_s
        if is_first:
            delivered.num_missed += (now_s - self._arrived_s) / interval_s
            return
        delivered.num_paced += 1
        delivered.reading_s += interval_s
        is_late = violates_delivered_tbt(now_s, previous_due_s, interval_s)
        if not waited_s and not is_late:
            return
        late_s = max(waited_s, now_s - previous_due_s - interval_s)
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
