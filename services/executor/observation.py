"""What a client that watches the engine sees of it at one moment.

It is made in the EngineCore process and read in the front's; between them it is plain lists and
dictionaries, since vLLM's utility calls carry nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import TypeAdapter

from services.pacing.cause import Cause
from services.placement.run.reason import Reason
from services.placement.types import RequestPhase


class GroupPlace(Enum):
    """Where one layer group's KV of a request is; one letter, for there are many."""

    RESIDENT = "R"
    OFFLOADED = "O"
    RESTORING = "B"  # on its way back; offloaded until it is complete


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestObservation:
    """One request that the scheduler has."""

    request_id: str  # the engine's; the front puts the client's in its place
    phase: RequestPhase
    num_prompt_tokens: int
    num_computed_tokens: int  # whose KV exists
    num_generated_tokens: int
    num_delivered_tokens: int  # by the newest count from the gateway
    num_deposited_tokens: int  # by the reader model
    num_late_tokens: int  # generated too late for the reader, deposit included
    interval_s: float  # S, between two tokens of the reader; 0: no pace was asked for
    pace_tail: bool = False  # the gateway delivers its deposit at its pace after the end
    late_cause: Cause | None = None  # of most of the late tokens
    why: Reason = Reason.QUEUE  # it runs, or does not
    residency: str = ""  # a `GroupPlace` value per layer group; empty without layer-wise KV


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixObservation:
    """What several requests begin with, and have in the pool once."""

    request_ids: tuple[str, ...]  # the engine's; the front puts the clients' in their place
    num_tokens: int  # its own, without those of prefixes before it
    residency: str  # a `GroupPlace` value per layer group


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineObservation:
    """All requests and the newest step."""

    requests: tuple[RequestObservation, ...] = ()  # in the order of their arrival
    num_steps: int = 0  # since the engine started
    observed_step_s: float = 0.0  # of the newest step, 0 before the first
    predicted_step_s: float | None = None  # for the newest step; None: nothing predicts
    num_pool_blocks: int = 0
    num_free_pool_blocks: int = 0
    num_cached_tokens: int = 0  # on the host, for requests that begin with them
    prefixes: tuple[PrefixObservation, ...] = ()  # that requests share
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    link_bytes_per_s: float | None = None  # from host to pool, while busy; None: not known
    tokens_per_step: float | None = None  # of a request that decodes; None: nothing drafts


_OBSERVATION = TypeAdapter(EngineObservation)


def to_plain(observation: EngineObservation) -> dict[str, Any]:
    """Return the observation as vLLM can send it."""
    plain: dict[str, Any] = _OBSERVATION.dump_python(observation, mode="json")
    return plain


def from_plain(plain: Mapping[str, Any]) -> EngineObservation:
    """Return what `to_plain` packed."""
    return _OBSERVATION.validate_python(plain)
