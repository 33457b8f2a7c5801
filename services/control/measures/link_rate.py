"""How fast one direction between host and pool is, from what it carried."""

from services.control.measures.step_timing import CopyTime
from services.placement.types import Link

KEPT_PER_STEP = 0.75  # of what was known, per step with copies: 90 % of it is gone after 8 steps
PEAK_KEPT_PER_STEP = 0.999
MIN_SHARE = 0.1  # of the busy time that the bytes take at least; the rest is overhead


class LinkRate:
    """Bytes over busy seconds of recent steps, less a fixed overhead per copy."""

    def __init__(self) -> None:
        self._overhead_s = 0.0
        self._num_bytes = 0.0
        self._busy_s = 0.0
        self._num_copies = 0.0
        self._peak_bytes_per_s = 0.0

    def calibrate(self, small: CopyTime, large: CopyTime) -> None:
        """Start from copies of two sizes, measured while the link was idle."""
        small_bytes = small.num_bytes / max(1, small.num_copies)
        large_bytes = large.num_bytes / max(1, large.num_copies)
        small_s = small.busy_s / max(1, small.num_copies)
        large_s = large.busy_s / max(1, large.num_copies)
        if large_bytes > small_bytes and large_s > small_s:
            rate = (large_bytes - small_bytes) / (large_s - small_s)
            self._overhead_s = max(0.0, small_s - small_bytes / rate)
        self.add(large)

    def add(self, sample: CopyTime) -> None:
        """Take in one step; steps without copies say nothing."""
        if sample.num_bytes <= 0 or sample.busy_s <= 0.0:
            return
        self._num_bytes = KEPT_PER_STEP * self._num_bytes + sample.num_bytes
        self._busy_s = KEPT_PER_STEP * self._busy_s + sample.busy_s
        self._num_copies = KEPT_PER_STEP * self._num_copies + sample.num_copies
        self._peak_bytes_per_s = max(self._rate(), PEAK_KEPT_PER_STEP * self._peak_bytes_per_s)

    def _rate(self) -> float:
        overhead_s = self._overhead_s * self._num_copies
        carrying_s = max(self._busy_s - overhead_s, MIN_SHARE * self._busy_s)
        return max(1.0, self._num_bytes / carrying_s)

    @property
    def bytes_per_s(self) -> float | None:
        """The rate of this moment; None before the first copy."""
        return self._rate() if self._busy_s > 0.0 else None

    def link(self, *, chunk_bytes: int, num_queued_bytes: int) -> Link | None:
        """Return the link of this moment; None before the first copy."""
        rate = self.bytes_per_s
        if rate is None:
            return None
        return Link(
            bytes_per_s=rate,
            peak_bytes_per_s=self._peak_bytes_per_s,
            copy_overhead_s=self._overhead_s,
            chunk_bytes=chunk_bytes,
            num_queued_bytes=num_queued_bytes,
        )
