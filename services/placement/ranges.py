"""What a field may hold, said by its type: a number is `Annotated` with its range.

Checked where a value enters a process; policies meet sound values only.
"""

import math
from dataclasses import dataclass
from typing import Annotated, TypeAlias

MAX_INT32 = 2**31 - 1
MAX_LAYERS = 1_024
MAX_REQUESTS = 1_024
MAX_PREFIXES = 1_024
MAX_BLOCKS = 2**40
MAX_SECONDS = 1e6
MAX_ID_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Within:
    """A finite number in [low, high]; of a tuple, each of its entries."""

    low: float = 0.0
    high: float = math.inf
    above_low: bool = False  # `low` itself is excluded

    def holds(self, value: float) -> bool:
        if self.above_low and value == self.low:
            return False
        return math.isfinite(value) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"in {'(' if self.above_low else '['}{self.low:g}, {self.high:g}]"


@dataclass(frozen=True, slots=True)
class AtMost:
    """A tuple of at most so many entries, or a text of characters; a text is not empty."""

    length: int


Count: TypeAlias = Annotated[int, Within(0, MAX_INT32)]
PositiveInt: TypeAlias = Annotated[int, Within(1, MAX_INT32)]
LongInt: TypeAlias = Annotated[int, Within(0, 2**63 - 1)]
Duration: TypeAlias = Annotated[float, Within()]  # seconds
Seconds: TypeAlias = Annotated[float, Within(0.0, MAX_SECONDS)]
PositiveSeconds: TypeAlias = Annotated[float, Within(1e-9, MAX_SECONDS)]
Rate: TypeAlias = Annotated[float, Within(1.0, 1e15)]  # per second
Epoch: TypeAlias = Annotated[int, Within(1, 2**63 - 1)]
Layers: TypeAlias = Annotated[int, Within(1, MAX_LAYERS)]
Buffers: TypeAlias = Annotated[int, Within(0, MAX_LAYERS)]
Blocks: TypeAlias = Annotated[int, Within(0, MAX_BLOCKS)]
PositiveBlocks: TypeAlias = Annotated[int, Within(1, MAX_BLOCKS)]  # blocks, or bytes of some
Window: TypeAlias = Annotated[int, Within(1, 4_096)]  # decode steps
TokensPerStep: TypeAlias = Annotated[float, Within(1.0, 1_024.0)]  # of a request that decodes
PerStep: TypeAlias = Annotated[float, Within(0.0, MAX_REQUESTS)]  # requests of a step
EachLayer: TypeAlias = Annotated[tuple[int, ...], AtMost(MAX_LAYERS), Within(0, MAX_INT32)]
EachGroup: TypeAlias = Annotated[tuple[int, ...], AtMost(MAX_LAYERS), Within(0, MAX_BLOCKS)]
EachSideGroup: TypeAlias = Annotated[tuple[int, ...], AtMost(MAX_LAYERS), Within(0, MAX_INT32)]
