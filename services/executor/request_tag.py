"""What a request was promised, on its way to the scheduler; why a token is late, on its way back.

The scheduler lives in another process; vLLM carries `SamplingParams.extra_args` there, and
`kv_transfer_params` of an output to the front.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from services.pacing.cause import Cause, Delay
from services.pacing.types import NO_SERVICE_LEVEL, Release, ServiceLevel

EXTRA_ARGS_KEY = "evenflow"
READS_KEY = "evenflow_reads"
DELAY_KEY = "evenflow_delay"


def to_extra_args(service_level: ServiceLevel, *, reads: bool = True) -> dict[str, Any]:
    """Return `SamplingParams.extra_args` that carry a service level, and whether tokens are read
    from the first one on, made of plain values.
    """
    return {EXTRA_ARGS_KEY: asdict(service_level), READS_KEY: reads}


def from_extra_args(extra_args: Mapping[str, Any] | None) -> ServiceLevel:
    """Return what `to_extra_args` packed; `NO_SERVICE_LEVEL` for a request without it."""
    packed = (extra_args or {}).get(EXTRA_ARGS_KEY)
    if packed is None:
        return NO_SERVICE_LEVEL
    release = packed["release"]
    return ServiceLevel(**packed | {"release": release and Release(release)})


def reads_from_first(extra_args: Mapping[str, Any] | None) -> bool:
    """Return whether tokens are read from the first one on; so they are in a request without it."""
    return bool((extra_args or {}).get(READS_KEY, True))


def to_transfer_params(delay: Delay) -> dict[str, Any]:
    """Return `kv_transfer_params` that carry a delay, made of plain values."""
    return {DELAY_KEY: (delay.cause.value, delay.late_s)}


def from_transfer_params(params: Mapping[str, Any] | None) -> Delay | None:
    """Return what `to_transfer_params` packed; None for an output without it."""
    if not params or DELAY_KEY not in params:
        return None
    cause, late_s = params[DELAY_KEY]
    return Delay(Cause(cause), late_s)
