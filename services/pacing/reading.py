"""What readers have of their tokens: how long they wait for them, and which come too early to
count.

A reader with a promised interval S takes the first token when it comes and expects each further
one S after the turn of the one before. A token that comes more than epsilon after that makes the
reader wait: it is late, and its coming is the turn that all later ones count from. So a reader has
read n tokens after (n - 1) S and the seconds waited, and a pause is as bad as it is long.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.pacing.attainment import DELIVERY_TOLERANCE_S, violates_delivered_tbt
from services.pacing.deposit import due_times_s, next_due_s

REBUFFERING = (
    "seconds that readers wait beyond their pace, after the first token / seconds that they read, "
    "S for each token after the first"
)
EFFECTIVE = (
    "tokens, each weighted by what its reader has in hand when it is generated: 1 up to 10 % of "
    "the answer, 0 from 20 % on, a straight line between (TokenFlow, 7.1.3); without a pace every "
    "token counts"
)
QOS = (
    "effective tokens, less those that readers would have read while they waited for the first "
    "token or later (TokenFlow's Eq. 2, with lambda and mu the reader's rate)"
)
FULL_FRAC = 0.1  # of the answer in hand: a token counts in full up to here
NO_FRAC = 0.2  # of the answer in hand: from here on it counts for nothing
ROUNDING = 1e-6  # of tokens, in sums of intervals


@dataclass(slots=True)
class Reading:
    """One reader's turns, token by token. Times are seconds on one clock."""

    interval_s: float  # S > 0
    tolerance_s: float = DELIVERY_TOLERANCE_S
    num_gaps: int = 0  # tokens after the first
    num_late: int = 0  # of them
    waited_s: float = 0.0  # beyond the pace, for all late tokens
    _turn_s: float | None = field(default=None, repr=False)  # of the newest token

    @property
    def turn_s(self) -> float | None:
        """Return when the newest token is read; None before the first."""
        return self._turn_s

    def num_in_hand(self, now_s: float) -> int:
        """Return how many tokens are there and not read."""
        if not self.interval_s or self._turn_s is None:
            return 0
        return max(0, math.ceil((self._turn_s - now_s) / self.interval_s - ROUNDING))

    @property
    def reading_s(self) -> float:
        """Return the time that the tokens after the first take to read; waiting apart."""
        return self.num_gaps * self.interval_s

    def took(self, at_s: float) -> float:
        """Take in that the next token is there. Returns how long its reader waited; 0: in time."""
        previous_s = self._turn_s
        if previous_s is None:
            self._turn_s = at_s
            return 0.0
        self.num_gaps += 1
        interval_s = self.interval_s
        if not violates_delivered_tbt(at_s, previous_s, interval_s, tolerance_s=self.tolerance_s):
            self._turn_s = previous_s + interval_s
            return 0.0
        self._turn_s = next_due_s(previous_s, at_s, interval_s)
        waited_s = at_s - previous_s - interval_s
        self.num_late += 1
        self.waited_s += waited_s
        return waited_s


def reading_of(
    taken_s: Iterable[float], interval_s: float, *, tolerance_s: float = DELIVERY_TOLERANCE_S
) -> Reading:
    """Return what a reader with the interval S > 0 had of tokens that came at these times."""
    reading = Reading(interval_s, tolerance_s)
    for at_s in taken_s:
        reading.took(at_s)
    return reading


def effective_tokens(num_in_hand: Mapping[int, int]) -> float:
    """Return how many tokens of one answer count. `num_in_hand`: how many of them were generated
    while so many before them were generated and not due.
    """
    num_tokens = sum(num_in_hand.values())
    return sum(
        number * _weight(in_hand / num_tokens) for in_hand, number in num_in_hand.items() if number
    )


def effective_of(generated_s: Sequence[float], interval_s: float) -> float:
    """Return how many tokens of one answer count that were generated at these times; S >= 0."""
    if not interval_s:
        return float(len(generated_s))
    due_s = due_times_s(generated_s, interval_s)
    return effective_tokens(
        Counter(
            max(0, number - bisect_right(due_s, now_s)) for number, now_s in enumerate(generated_s)
        )
    )


def _weight(in_hand_frac: float) -> float:
    return min(1.0, max(0.0, (NO_FRAC - in_hand_frac) / (NO_FRAC - FULL_FRAC)))
