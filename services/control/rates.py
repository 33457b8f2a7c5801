"""What the engine measures of itself: link rates, step time, prefill rate."""

from collections.abc import Mapping
from typing import Any

NEW_SAMPLE = 0.2  # weight of the newest sample in an average


class Average:
    """Exponential moving average; None until the first sample."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, sample: float) -> None:
        before = sample if self.value is None else self.value
        self.value = before + NEW_SAMPLE * (sample - before)


class Rates:
    """Averages over recent steps."""

    def __init__(self, block_bytes: int) -> None:
        """`block_bytes`: of one layer group on one rank."""
        self.block_bytes = block_bytes
        self.h2d_bytes_per_s = Average()  # while the link is busy, slowest rank
        self.d2h_bytes_per_s = Average()
        self.step_s = Average()  # of steps without prefill
        self.prefill_tokens_per_s = Average()

    def note_copies(self, ranks: Mapping[str, Mapping[str, Any]]) -> None:
        """Take in what each rank has copied since its last report (`KVStats`)."""
        for direction, average in (("h2d", self.h2d_bytes_per_s), ("d2h", self.d2h_bytes_per_s)):
            samples = [
                sums[f"{direction}_bytes"] / sums[f"{direction}_busy_s"]
                for sums in ranks.values()
                if sums.get(f"{direction}_busy_s", 0.0) > 0.0
            ]
            if samples:
                average.add(min(samples))

    def note_step(self, duration_s: float, *, num_tokens: int, num_prefill_tokens: int) -> None:
        """Take in a step, timed by its output: see `StepClock`."""
        if num_tokens <= 0 or duration_s <= 0.0:
            return
        if num_prefill_tokens == 0:
            self.step_s.add(duration_s)
        elif num_prefill_tokens >= num_tokens // 2:
            beyond_decode_s = max(duration_s - (self.step_s.value or 0.0), 0.1 * duration_s)
            self.prefill_tokens_per_s.add(num_prefill_tokens / beyond_decode_s)


def write_budget_blocks(rates: Rates, *, max_blocks: int, num_under_way: int) -> int:
    """Return how many blocks write-through may order in this step.

    As much as the link moves in a step, and less while earlier copies are still under way: a
    queue of a few steps would delay the copies that steps wait for. At least one block, or a slow
    link would mirror nothing; 0 if `max_blocks` is.
    """
    if max_blocks <= 0:
        return 0
    rate, step_s = rates.d2h_bytes_per_s.value, rates.step_s.value
    if rate is None or step_s is None:
        return max_blocks
    per_step = min(max_blocks, max(1, int(rate * step_s / rates.block_bytes)))
    return max(0, min(per_step, 3 * per_step - num_under_way))
