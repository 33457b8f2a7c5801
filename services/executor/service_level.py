"""What a request was promised, on its way to the scheduler.

The scheduler lives in another process; vLLM carries `SamplingParams.extra_args` there.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from services.pacing.types import NO_SERVICE_LEVEL, ServiceLevel

EXTRA_ARGS_KEY = "evenflow"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTag:
    """What the scheduler knows of a request beside what vLLM tells it."""

    service_level: ServiceLevel = NO_SERVICE_LEVEL
    generation: int = 1  # how often the request was routed, >= 1


NO_TAG = RequestTag()


def to_extra_args(tag: RequestTag) -> dict[str, Any]:
    """Return `SamplingParams.extra_args` that carry `tag`, made of plain values."""
    return {EXTRA_ARGS_KEY: asdict(tag)}


def from_extra_args(extra_args: Mapping[str, Any] | None) -> RequestTag:
    """Return the tag that `to_extra_args` packed; `NO_TAG` for a request without one."""
    packed = (extra_args or {}).get(EXTRA_ARGS_KEY)
    if packed is None:
        return NO_TAG
    return RequestTag(
        service_level=ServiceLevel(**packed["service_level"]), generation=packed["generation"]
    )
