"""What the engine learns of itself while it runs: all that policies know of the machine."""

from dataclasses import dataclass
from typing import Protocol

from services.placement.types import Link, Profile
from simulator.copies import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One step as the engine sees it, noise included."""

    step_s: float
    layer_s: float  # compute of one layer, mean
    stall_s: float  # in which layers waited for copies
    num_tokens: int  # computed
    num_context_tokens: int  # KV tokens read, over all requests
    num_prefill_tokens: int  # of `num_tokens`
    num_output_tokens: int  # requests that got a token


class Learner(Protocol):
    """An online profile, and a predictor of answer lengths."""

    def add(self, step: MeasuredStep) -> None:
        """Take in one step."""

    def profile(self) -> Profile | None:
        """Return the profile of this moment; None while too little has been measured."""

    def pace(self) -> tuple[float | None, float | None]:
        """Return the length of a decode step and prompt tokens per second, averages of late."""

    def answer_ended(self, num_output_tokens: int) -> None:
        """Take in the length of a complete answer."""

    def predict_output(self, num_output_tokens: int, max_tokens: int) -> tuple[int, int] | None:
        """Return a range of the whole answer's length, given its length so far and its limit."""


KEPT_PER_SAMPLE = 0.75  # of what was known, per step with copies


class LinkMeter:
    """The rate of a lane by what it carried lately, less a known overhead per copy."""

    def __init__(self, lane: Lane, *, calibrated_bytes_per_s: float) -> None:
        """`calibrated_bytes_per_s`: as measured before the first step."""
        self._lane = lane
        self._seconds = 0.0
        self._bytes = 0.0
        self._rate = self._peak = calibrated_bytes_per_s
        self._last = (0, 0.0, 0)

    def sample(self) -> None:
        """Take in what the lane has done since the last call."""
        counts = self._lane.counts
        now = (counts.carried_bytes, counts.busy_s, counts.num_copies)
        num_bytes, busy_s, num_copies = (b - a for a, b in zip(self._last, now, strict=True))
        self._last = now
        carrying_s = busy_s - num_copies * self._lane.copy_overhead_s
        if num_bytes <= 0 or carrying_s <= 0.0:
            return
        self._bytes = KEPT_PER_SAMPLE * self._bytes + num_bytes
        self._seconds = KEPT_PER_SAMPLE * self._seconds + carrying_s
        self._rate = self._bytes / self._seconds
        self._peak = max(self._rate, 0.999 * self._peak)

    def link(self, *, num_queued_bytes: int) -> Link:
        return Link(
            bytes_per_s=self._rate,
            peak_bytes_per_s=self._peak,
            copy_overhead_s=self._lane.copy_overhead_s,
            chunk_bytes=self._lane.chunk_bytes,
            num_queued_bytes=num_queued_bytes,
        )
