"""When a synthetic executor generates the tokens of its streams."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`burst` tokens of each stream at a time, streams one after the other or all at once."""

    num_streams: int
    interval_s: float  # between two tokens of a reader
    burst: int  # tokens of one stream generated together
    speedup: float  # of generation over reading, >= 1; above 1 a late frame puts off no reader
    staggered: bool  # False: one frame holds a burst of every stream
    num_bursts: int

    @property
    def num_tokens(self) -> int:
        """Return the output length of each stream."""
        return self.burst * self.num_bursts

    @property
    def period_s(self) -> float:
        """Return the time between two bursts of a stream."""
        return self.burst * self.interval_s / self.speedup

    def turns(self) -> Iterator[tuple[float, int, int]]:
        """Yield seconds from the start, stream, and burst number, in order of time."""
        for number in range(self.num_bursts):
            for stream in range(self.num_streams):
                phase = stream / self.num_streams if self.staggered else 0.0
                yield (number + phase) * self.period_s, stream, number
