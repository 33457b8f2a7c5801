"""What an executor says of its load, to gateways and to the tracker."""

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from services.placement.ranges import Count, Duration, LongInt, Within

Share: TypeAlias = Annotated[float, Within(0.0, 1.0)]
PerSecond: TypeAlias = Annotated[float, Within()]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorLoad:
    """Of one moment, over all gateways. Newcomers are requests without a token yet."""

    num_running_reqs: Count = 0  # that the engine is computing
    num_newcomers: Count = 0
    num_newcomer_tokens: LongInt = 0  # of their prompts, and of what was computed elsewhere
    prefill_tps: PerSecond = 0.0  # such tokens per second; 0: not measured
    kv_unavailable_frac: Share = 0.0  # of the KV pool, that a newcomer cannot have
    deposit_s: Duration = 0.0  # of reading, that paced readers have in hand on average
    reading_load_frac: Share = 0.0  # what they read of what the engine makes; 1: all, or more
