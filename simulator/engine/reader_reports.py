"""What the scheduler hears of its readers, and how late: by the gateway's and the executor's rules.

A gateway counts what its readers have at every multiple of an interval. The executor passes the
newest counts on into the engine's process, one call at a time and at most one per interval; the
engine answers a call between two steps; each count says when it was true.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable

from simulator.memory.requests import SimulatedRequest


class ReaderReports:
    """The call that is in flight, and when the next one may be made."""

    def __init__(self, interval_s: float) -> None:
        """`interval_s` 0: nothing is reported, tokens are taken to reach readers when due."""
        self._interval_s = interval_s
        self._called_s = 0.0  # the call in flight, or the next one

    def take_in(self, requests: Iterable[SimulatedRequest], now_s: float) -> None:
        """Answer the call in flight, between two steps."""
        if not self._interval_s or self._called_s >= now_s:
            return
        counted_s = math.floor(self._called_s / self._interval_s) * self._interval_s
        for request in requests:
            num_delivered = bisect_right(request.due_s, counted_s)
            if num_delivered > request.num_told:  # what has not changed is not told again
                request.num_told = num_delivered
                request.reader.deliver(num_delivered, counted_s)
        next_s = self._called_s + self._interval_s
        self._called_s = max(next_s, now_s)
