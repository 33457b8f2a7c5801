"""What a reader was promised."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevel:
    """Latency bounds and reading rate of one request; None means no bound."""

    slo_ttft_s: float | None = None  # > 0, time to first token
    slo_tpot_s: float | None = None  # > 0, mean time per output token after the first
    slo_tbt_s: float | None = None  # > 0, largest gap between two tokens
    consumption_rate_tps: float | None = None  # > 0, tokens per second that the reader reads
    pace_tail: bool = False  # keep the pace for tokens still held back when generation ends


NO_SERVICE_LEVEL = ServiceLevel()
