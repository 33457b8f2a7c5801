"""When a synthetic executor generates the tokens of its streams."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Turn(NamedTuple):
    """When an executor generates a burst of a stream."""

    at_s: float  # from the start
    stream: int
    number: int  # of the stream's bursts
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`burst` tokens of each stream at a time, streams one after the other or all at once."""

    num_streams: int
    interval_s: float  # between two tokens of a reader
    burst: int  # tokens of one stream generated together
    speedup: float  # of generation over reading, >= 1; above 1 a late frame puts off no reader
    staggered: bool  # False: one frame holds a burst of every stream
    num_bursts: int
    num_ahead: int = 0  # bursts that come with the first one

    @property
    def num_tokens(self) -> int:
        """Return the output length of each stream."""
        return self.burst * self.num_bursts

    @property
    def period_s(self) -> float:
        """Return the time between two bursts of a stream."""
        return self.burst * self.interval_s / self.speedup

    def turns(self) -> list[Turn]:
        """Return the turns of all streams in order of time."""
        return sorted(turn for stream in range(self.num_streams) for turn in self._turns(stream))

    def _turns(self, stream: int) -> Iterator[Turn]:
        phase = stream / self.num_streams if self.staggered else 0.0
        start = phase * (1 + self.num_ahead)  # streams begin so that no more comes than later
        for number in range(self.num_bursts):
            at_s = (start + max(0, number - self.num_ahead)) * self.period_s
            yield Turn(at_s, stream, number, number + 1 == self.num_bursts)
