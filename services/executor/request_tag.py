"""What a request was promised, on its way to the scheduler.

The scheduler lives in another process; vLLM carries `SamplingParams.extra_args` there.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from services.pacing.types import NO_SERVICE_LEVEL, ServiceLevel

EXTRA_ARGS_KEY = "evenflow"


def to_extra_args(service_level: ServiceLevel) -> dict[str, Any]:
    """Return `SamplingParams.extra_args` that carry a service level, made of plain values."""
    return {EXTRA_ARGS_KEY: asdict(service_level)}


def from_extra_args(extra_args: Mapping[str, Any] | None) -> ServiceLevel:
    """Return what `to_extra_args` packed; `NO_SERVICE_LEVEL` for a request without it."""
    packed = (extra_args or {}).get(EXTRA_ARGS_KEY)
    return NO_SERVICE_LEVEL if packed is None else ServiceLevel(**packed)
