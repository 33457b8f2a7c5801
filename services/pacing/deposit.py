"""Token-Deposit: when each token is due at the reader (OrbitFlow, section 3.4).

A token generated faster than it is read waits; while it waits it is *deposited*, and covers a
later gap in generation. With release interval S and generation times g_k, token k is due at

    d_1 = g_1,    d_k = max(g_k, d_{k-1} + S)

so that tokens are at least S apart, never early, and never later than generation forces.
All times are seconds on one clock.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable

from services.pacing.types import Release, ServiceLevel

MAX_SMOOTH_S = 0.4


def release_interval_s(level: ServiceLevel) -> float:
    """Return S: 1 / reading rate, else the TBT SLO, else the TPOT SLO, else 0 (never held back)."""
    if level.consumption_rate_tps is not None:
        return 1.0 / level.consumption_rate_tps
    return level.slo_tbt_s or level.slo_tpot_s or 0.0


def max_held_s(level: ServiceLevel) -> float:
    """Return for how long a token is kept back at most; infinite: until it is due."""
    match level.release:
        case Release.AT_ONCE:
            return 0.0
        case Release.SMOOTH:
            return MAX_SMOOTH_S
    return math.inf


def next_due_s(previous_due_s: float | None, generated_s: float, interval_s: float) -> float:
    """Return d_k from d_{k-1} (None for the first token), g_k and S >= 0."""
    if previous_due_s is None:
        return generated_s
    due_s = previous_due_s + interval_s
    return due_s if due_s > generated_s else generated_s


def due_times_s(
    generated_s: Iterable[float], interval_s: float, *, flushed_s: float = float("inf")
) -> list[float]:
    """Return every d_k of one request, in order.

    At `flushed_s` the rest is due at once: the end of generation, unless the tail keeps its pace.
    It is not before any g_k.
    """
    due: list[float] = []
    for g in generated_s:
        due.append(min(next_due_s(due[-1] if due else None, g, interval_s), max(g, flushed_s)))
    return due


def num_deposited(generated_s: Iterable[float], due_s: Iterable[float], now_s: float) -> int:
    """Return the size of the deposit {k : g_k <= now < d_k}."""
    return sum(g <= now_s < d for g, d in zip(generated_s, due_s, strict=True))


class ReaderModel:
    """How many tokens one reader has in hand, between two reports of what was delivered.

    The scheduler's view: it sees generation at once and delivered counts late. From the newest
    count on it assumes that each token reaches the reader when it is due. What is not read, such
    as what a model thinks, is due at once behind what is before it; which tokens those are is
    told late, too.
    """

    def __init__(self, interval_s: float, *, reads: bool = True) -> None:
        """`reads`: whether tokens are read from the first one on."""
        self._interval_s = interval_s
        self.reads = reads  # whether the newest tokens are read, and those to come
        self._due_s: list[float] = []  # of every token, ascending
        self.turn_s: float | None = None  # when the newest token that is read is due
        self._run: tuple[int, float | None] = (0, None)  # first token since `turned`; turn before
        self._num_reported = 0
        self._num_due_at_report = 0  # tokens due by the time of the newest report
        self._report_s: float | None = None  # when the count last grew

    @property
    def last_due_s(self) -> float | None:
        """Return when the newest token is due; None before the first."""
        return self._due_s[-1] if self._due_s else None

    def generated(self, now_s: float) -> None:
        """Record one token generated at `now_s`, not before earlier calls."""
        due_s = next_due_s(self.turn_s, now_s, self._interval_s if self.reads else 0.0)
        self._due_s.append(due_s)
        if self.reads:
            self.turn_s = due_s

    def resumed(self, num_generated: int, last_due_s: float) -> None:
        """Begin with tokens that were generated elsewhere, at least one, the newest of which is due
        at `last_due_s`; those before it as far apart as they are read.
        """
        interval_s = self._interval_s if self.reads else 0.0
        self._due_s = [last_due_s - interval_s * n for n in reversed(range(num_generated))]
        self.turn_s = last_due_s if self.reads else None
        self._run = (num_generated, self.turn_s)

    def turned(self, index: int, *, reads: bool, now_s: float) -> None:
        """Take over that tokens from `index` on are read, or are not, and those to come."""
        if reads is self.reads:
            return
        index = min(index, len(self._due_s))
        since, self._due_s = self._due_s[index:], self._due_s[:index]
        first, turn_before_s = self._run
        if not reads:
            self.turn_s = self._due_s[-1] if index > first else turn_before_s
        self.reads, self._run = reads, (index, self.turn_s)
        for due_s in since:
            self.generated(min(due_s, now_s))

    def repace(self, interval_s: float, now_s: float) -> None:
        """Take over that tokens which are not due by `now_s`, and those to come, are read
        `interval_s` apart.
        """
        self._interval_s = interval_s
        first, turn_before_s = self._run
        start = max(first, bisect_right(self._due_s, now_s))
        num_waiting = len(self._due_s) - start
        if not self.reads or num_waiting <= 0:
            return
        del self._due_s[start:]
        self.turn_s = self._due_s[-1] if start > first else turn_before_s
        for _ in range(num_waiting):
            self.generated(now_s)

    def delivered(self, num_delivered: int, now_s: float) -> None:
        """Take over a delivered count that was true at `now_s`."""
        if num_delivered > self._num_reported:
            self._num_reported, self._report_s = num_delivered, now_s
        num_due = bisect_right(self._due_s, now_s)
        self._num_due_at_report = max(self._num_due_at_report, num_due)

    def num_deposited(self, now_s: float) -> int:
        """Return the deposit at `now_s`, >= 0; `now_s` is not before the newest report."""
        num_due = max(0, bisect_right(self._due_s, now_s) - self._num_due_at_report)
        return max(0, len(self._due_s) - self._num_reported - num_due)

    def last_release_s(self, now_s: float) -> float | None:
        """Return when the newest token reached the reader; None before the first.

        `now_s` is not before the newest report.
        """
        num_due = bisect_right(self._due_s, now_s)
        if num_due > self._num_due_at_report:
            return self._due_s[num_due - 1]
        if self._report_s is not None:
            return self._report_s
        return self._due_s[num_due - 1] if num_due else None
