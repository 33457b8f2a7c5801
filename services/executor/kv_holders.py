"""What holds KV at one moment: live requests, and sessions that it is kept for.

It is made in the EngineCore process when it is asked for, and read in the front's; between them it
is plain lists and dictionaries, as an `EngineObservation` is. Tokens are of all layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from services.placement.run.reason import Reason
from services.placement.types import RequestPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class KVUse:
    """Where one request's KV is, in tokens."""

    num_pool_tokens: int = 0  # its own in the pool; blocks of some layers count in part
    num_host_tokens: int = 0  # leading ones with a complete copy on the host
    num_shared_tokens: int = 0  # leading ones that it has together with other live requests


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingRequest:
    """One request that the scheduler has."""

    request_id: str  # the engine's; the front puts the client's in its place
    phase: RequestPhase
    priority: int
    why: Reason  # it runs, or does not
    waited_s: float  # since it was last part of a step; 0 while it runs, or is held
    num_recomputed_tokens: int  # computed once more so far, since their KV was lost
    use: KVUse


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingSession:
    """What is kept for one session of an account, once its requests have ended."""

    account: str  # empty without API keys
    session_id: str  # empty: what no session may release
    num_retained_tokens: int
    # Unset: too much is kept for the sessions before it for each block to be looked up.
    num_pool_tokens: int | None = None  # of these, in the pool
    num_host_tokens: int | None = None  # of these, on the host
    retained_for_s: float | None = None  # until the last of them is kept no more


@dataclass(frozen=True, slots=True, kw_only=True)
class KVHolders:
    """All live requests, and the sessions that most is kept for."""

    requests: tuple[HoldingRequest, ...] = ()
    sessions: tuple[HoldingSession, ...] = ()  # most tokens first
    num_sessions: int = 0  # that there are


_HOLDERS = TypeAdapter(KVHolders)


def to_plain(holders: KVHolders) -> dict[str, Any]:
    """Return the account as vLLM can send it."""
    plain: dict[str, Any] = _HOLDERS.dump_python(holders, mode="json")
    return plain


def from_plain(plain: Mapping[str, Any]) -> KVHolders:
    """Return what `to_plain` packed."""
    return _HOLDERS.validate_python(plain)
