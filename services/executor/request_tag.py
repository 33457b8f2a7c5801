"""What a request was promised and has already, on its way to the scheduler; and why a token is
late, and what is kept of its KV, on their way back.

The scheduler lives in another process; vLLM carries `SamplingParams.extra_args` there, and
`kv_transfer_params` of an output to the front.
"""

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any

from services.generation.retention import (
    RejectedRetention,
    Retained,
    RetainedSpan,
    RetentionStatus,
)
from services.pacing.cause import Cause, Delay
from services.pacing.types import NO_SERVICE_LEVEL, Release, ServiceLevel

EXTRA_ARGS_KEY = "evenflow"
READS_KEY = "evenflow_reads"
FAIRNESS_KEY = "evenflow_fairness_id"
RESUME_KEY = "evenflow_resume"
RETENTION_KEY = "evenflow_retention"
TOOL_TURN_KEY = "evenflow_tool_turn"
DELAY_KEY = "evenflow_delay"
RETAINED_KEY = "evenflow_retained"


def to_extra_args(service_level: ServiceLevel, *, reads: bool = True) -> dict[str, Any]:
    """Return `SamplingParams.extra_args` that carry a service level, and whether tokens are read
    from the first one on, made of plain values.
    """
    return {EXTRA_ARGS_KEY: asdict(service_level), READS_KEY: reads}


def with_fairness_id(extra_args: dict[str, Any], fairness_id: str) -> dict[str, Any]:
    """Return `extra_args` that carry a fairness id, too, unless it is empty."""
    return extra_args | ({FAIRNESS_KEY: fairness_id} if fairness_id else {})


def fairness_id_of(extra_args: Mapping[str, Any] | None) -> str:
    """Return what `with_fairness_id` packed; empty for a request without it."""
    return str((extra_args or {}).get(FAIRNESS_KEY, ""))


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


@dataclass(frozen=True, slots=True)
class Begun:
    """What a request has that was begun elsewhere. Instants are of `time.monotonic()`, which all
    processes of a machine share.
    """

    output_ids: list[int]
    num_delivered_tokens: int
    last_due_s: float  # when the newest token is due at the reader
    arrived_s: float  # at its gateway


def with_begun(extra_args: dict[str, Any], begun: Begun, *, reads: bool) -> dict[str, Any]:
    """Return `extra_args` that carry what a request has, too, made of plain values, and whether the
    tokens to come are read.
    """
    return extra_args | {READS_KEY: reads, RESUME_KEY: astuple(begun)}


def begun_of(extra_args: Mapping[str, Any] | None) -> Begun | None:
    """Return what `with_begun` packed; None for a request that begins here."""
    packed = (extra_args or {}).get(RESUME_KEY)
    return None if packed is None else Begun(*packed)


def to_transfer_params(delay: Delay) -> dict[str, Any]:
    """Return `kv_transfer_params` that carry a delay, made of plain values."""
    return {DELAY_KEY: (delay.cause.value, delay.late_s)}


def from_transfer_params(params: Mapping[str, Any] | None) -> Delay | None:
    """Return what `to_transfer_params` packed; None for an output without it."""
    if not params or DELAY_KEY not in params:
        return None
    cause, late_s = params[DELAY_KEY]
    return Delay(Cause(cause), late_s)


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Tokens of a request that are to be kept."""

    account: str
    session_id: str  # empty: of no session
    spans: list[tuple[int, float]]  # their ends, 0: all of the request; and seconds from its end


def with_kept(extra_args: Mapping[str, Any] | None, kept: KeptTokens) -> dict[str, Any]:
    """Return `extra_args` that carry what is to be kept, too, made of plain values."""
    return {**(extra_args or {}), RETENTION_KEY: astuple(kept)}


def kept_of(extra_args: Mapping[str, Any] | None) -> KeptTokens | None:
    """Return what `with_kept` packed; None for a request of which nothing is asked to be kept."""
    packed = (extra_args or {}).get(RETENTION_KEY)
    return None if packed is None else KeptTokens(*packed)


@dataclass(frozen=True, slots=True)
class ToolTurn:
    """Tokens of a request that the next turn begins with if its answer ends with a tool call."""

    account: str
    session_id: str  # empty: of no session
    end: int  # 0: all of the request


def with_tool_turn(extra_args: Mapping[str, Any] | None, turn: ToolTurn) -> dict[str, Any]:
    """Return `extra_args` that carry what a tool call is to keep, too, made of plain values."""
    return {**(extra_args or {}), TOOL_TURN_KEY: astuple(turn)}


def tool_turn_of(extra_args: Mapping[str, Any] | None) -> ToolTurn | None:
    """Return what `with_tool_turn` packed; None for a request whose answer calls no tools."""
    packed = (extra_args or {}).get(TOOL_TURN_KEY)
    return None if packed is None else ToolTurn(*packed)


def retained_to_params(retained: Retained) -> dict[str, Any]:
    """Return `kv_transfer_params` that carry what is kept, made of plain values."""
    reason = retained.reason and retained.reason.value
    spans = [astuple(span) for span in retained.spans]
    return {RETAINED_KEY: (retained.status.value, reason, spans)}


def retained_from_params(params: Mapping[str, Any] | None) -> Retained | None:
    """Return what `retained_to_params` packed; None for an output without it."""
    if not params or RETAINED_KEY not in params:
        return None
    status, reason, spans = params[RETAINED_KEY]
    return Retained(
        status=RetentionStatus(status),
        reason=reason and RejectedRetention(reason),
        spans=tuple(RetainedSpan(end=end, retention_s=seconds) for end, seconds in spans),
    )
