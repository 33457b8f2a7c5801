"""Which executor takes a request. No I/O."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from services.gateway.errors import UnknownModelError
from services.kit.errors import UnavailableError

LOAD_BOUND = 1.25  # x the mean of executors' requests, that conversations may bring one to


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A connected executor at this moment."""

    address: str
    models: frozenset[str]  # that it serves
    max_model_len: int  # prompt and output tokens of one request at most
    num_inflight: int  # requests of this gateway that it has not ended, >= 0
    caches_prefixes: bool = False
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # by model; of what must be equal
    numerics: str = ""  # of what rounds
    is_repeatable: bool = False  # with equal numerics tokens do not depend on what is beside them
    makes_drafts: bool = False  # on which draws with a seed depend
    epoch: int = 0  # number of its start, greater for later ones; 0: not known


def choose_executor(
    candidates: Sequence[Candidate],
    model: str,
    *,
    excluded: Collection[str] = (),
    turn: int = 0,
    conversation: bytes = b"",
) -> Candidate:
    """Return the executor of `model`, its address not in `excluded`, that takes a request.

    It is the home of `conversation`, at most 64 bytes, if the executors cache prefixes; otherwise,
    or if that is empty, the least loaded, equals by turns, counted by the caller from 0. Raises
    UnknownModelError if executors are connected and none serves the model, UnavailableError if
    none is connected or all that serve it are excluded.
    """
    if not candidates:
        raise UnavailableError("no executor is connected")
    serving = [candidate for candidate in candidates if model in candidate.models]
    if not serving:
        raise UnknownModelError(model)
    eligible = [candidate for candidate in serving if candidate.address not in excluded]
    if not eligible:
        raise UnavailableError(f'no executor of the model "{model}" can take the request')
    if conversation and all(candidate.caches_prefixes for candidate in eligible):
        return _home(conversation, eligible)
    least = min(candidate.num_inflight for candidate in eligible)
    equals = [candidate for candidate in eligible if candidate.num_inflight == least]
    return equals[turn % len(equals)]


def _home(conversation: bytes, candidates: Sequence[Candidate]) -> Candidate:
    """Return the executor that all gateways send a conversation's turns to: rendezvous hashing with
    bounded load (Mirrokni et al., "Consistent Hashing with Bounded Loads", 2018). One that has its
    share of requests already is passed over; there always is one that has not.
    """
    num_requests = 1 + sum(candidate.num_inflight for candidate in candidates)
    most = math.ceil(LOAD_BOUND * num_requests / len(candidates))
    return max(
        (candidate for candidate in candidates if candidate.num_inflight < most),
        key=lambda one: blake2b(one.address.encode(), key=conversation).digest(),
    )
