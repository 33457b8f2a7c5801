"""What a reader was promised."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, TypeAlias


@dataclass(frozen=True, slots=True)
class FinitePositive:
    """A finite number above 0."""

    def holds(self, value: float) -> bool:
        return 0.0 < value < math.inf

    def __str__(self) -> str:
        return "finite and > 0"


Bound: TypeAlias = Annotated[float, FinitePositive()]


class Release(StrEnum):
    """When text goes to the client. A text itself: service levels are packed as plain values."""

    PACED = "paced"  # each token when it is due by the pace
    AT_ONCE = "at_once"  # as it is generated; by its pace the reader reads it later
    SMOOTH = "smooth"  # by the pace, and kept back for `MAX_SMOOTH_S` at most


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevel:
    """Latency bounds and reading rate of one request; None means no bound."""

    slo_ttft_s: Bound | None = None  # time to first token
    slo_tpot_s: Bound | None = None  # mean time per output token after the first
    slo_tbt_s: Bound | None = None  # largest gap between two tokens
    consumption_rate_tps: Bound | None = None  # tokens per second that the reader reads
    pace_tail: bool = False  # keep the pace for tokens still held back when generation ends
    release: Release | None = None  # None: paced, if there is a pace
    max_in_hand_s: Bound | None = None  # of reading, from which on generation rests


NO_SERVICE_LEVEL = ServiceLevel()
