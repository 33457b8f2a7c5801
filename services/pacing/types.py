"""What a reader was promised."""

import math
from dataclasses import dataclass
from typing import Annotated, TypeAlias


@dataclass(frozen=True, slots=True)
class FinitePositive:
    """A finite number above 0."""

    def holds(self, value: float) -> bool:
        return 0.0 < value < math.inf

    def __str__(self) -> str:
        return "finite and > 0"


Bound: TypeAlias = Annotated[float, FinitePositive()]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevel:
    """Latency bounds and reading rate of one request; None means no bound."""

    slo_ttft_s: Bound | None = None  # time to first token
    slo_tpot_s: Bound | None = None  # mean time per output token after the first
    slo_tbt_s: Bound | None = None  # largest gap between two tokens
    consumption_rate_tps: Bound | None = None  # tokens per second that the reader reads
    pace_tail: bool = False  # keep the pace for tokens still held back when generation ends


NO_SERVICE_LEVEL = ServiceLevel()
