"""Which executor takes a request. No I/O."""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from services.gateway.errors import UnknownModelError
from services.gateway.types import ServedModel
from services.kit.errors import UnavailableError
from services.reporting.load import ExecutorLoad

NEAR_S = 1.0  # waits that differ by no more are as good: for a home, and for a deposit
SLO_SHARE = 0.5  # of a TTFT SLO, that a home may cost
UNMEASURED_TPS = 2_000.0  # at which an executor is taken to compute prompts that has not yet
STAND_IN_S = 0.25  # of waiting, for each of this gateway's requests where no load is known
NUM_TRIED = 4  # executors, at random of more: gateways that see the same do not choose the same
HORIZON_S = 10.0  # of a new reader, in which the executor makes or takes deposits


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A connected executor at this moment."""

    address: str
    models: frozenset[str]  # that it serves
    max_model_len: int  # prompt and output tokens of one request at most
    num_inflight: int  # requests of this gateway that it has not ended, >= 0
    load: ExecutorLoad | None = None  # of all gateways' requests; None: not known
    num_unreported_tokens: int = 0  # of prompts of this gateway's that `load` lacks, >= 0
    caches_prefixes: bool = False
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # by model; of what must be equal
    numerics: str = ""  # of what rounds
    is_repeatable: bool = False  # with equal numerics tokens do not depend on what is beside them
    makes_drafts: bool = False  # on which draws with a seed depend
    epoch: int = 0  # number of its start, greater for later ones; 0: not known


def candidate_of(address: str, info: ServedModel) -> Candidate:
    """Return an executor that has nothing to do."""
    served = info.each()
    return Candidate(
        address=address,
        models=frozenset(one.model for one in served),
        max_model_len=info.max_model_len,
        num_inflight=0,
        caches_prefixes=info.caches_prefixes,
        fingerprints={one.model: one.fingerprint for one in served},
        numerics=info.numerics,
        is_repeatable=info.is_repeatable,
        makes_drafts=info.makes_drafts,
        epoch=info.epoch,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What decides where a request goes."""

    model: str
    num_prompt_tokens: int = 0  # about so many
    fits: Callable[[int], bool] = lambda _: True  # says whether a context of so many tokens may do
    conversation: bytes = b""  # at most 64; empty: it begins nothing that may be cached
    slo_ttft_s: float | None = None
    is_paced: bool = False  # its reader takes time
    excluded: Collection[str] = ()  # addresses of executors that are not to be asked
    turn: int = 0  # counts requests, from 0


def choose_executor(
    candidates: Sequence[Candidate], wanted: Wanted, rng: random.Random
) -> Candidate:
    """Return the executor that takes a request.

    Of those that serve its model and have room for it, or else the longest context: its
    conversation's home, if they cache prefixes and it need not wait `NEAR_S` longer there than
    elsewhere; with a TTFT SLO that of the least wait; for a paced reader, of those that are near
    to the least wait, that of the largest deposit to spare; else the best of `NUM_TRIED` at random
    (after Mitzenmacher, "The Power of Two Choices", 2001). Equals come by turns. Raises
    UnknownModelError if executors are connected and none serves the model, UnavailableError if
    none is connected or all that serve it are excluded.
    """
    eligible = _eligible(candidates, wanted)
    first = wanted.turn % len(eligible)
    eligible = eligible[first:] + eligible[:first]
    waits_s = {one.address: expected_wait_s(one) for one in eligible}

    def wait(one: Candidate) -> tuple[float, float, int]:
        own_s = min(NEAR_S, wanted.num_prompt_tokens / _prefill_tps(one))
        held = one.load.kv_unavailable_frac if one.load is not None else 0.0
        return waits_s[one.address] + own_s, held, one.num_inflight

    best_s = min(waits_s.values())
    if wanted.conversation and all(one.caches_prefixes for one in eligible):
        home = _home(wanted.conversation, eligible)
        slack_s = min(NEAR_S, SLO_SHARE * (wanted.slo_ttft_s or NEAR_S / SLO_SHARE))
        if waits_s[home.address] <= best_s + slack_s:
            return home
    if wanted.slo_ttft_s is not None:
        return min(eligible, key=wait)
    if wanted.is_paced:
        near = [one for one in eligible if waits_s[one.address] <= best_s + NEAR_S]
        return min(near, key=lambda one: (-spare_deposit_s(one), *wait(one)))
    tried = eligible if len(eligible) <= NUM_TRIED else rng.sample(eligible, NUM_TRIED)
    return min(tried, key=wait)


def _eligible(candidates: Sequence[Candidate], wanted: Wanted) -> list[Candidate]:
    if not candidates:
        raise UnavailableError("no executor is connected")
    serving = [one for one in candidates if wanted.model in one.models]
    if not serving:
        raise UnknownModelError(wanted.model)
    longest = max(one.max_model_len for one in serving)
    eligible = [
        one
        for one in serving
        if one.address not in wanted.excluded
        and (one.max_model_len == longest or wanted.fits(one.max_model_len))
    ]
    if not eligible:
        raise UnavailableError(f'no executor of the model "{wanted.model}" can take the request')
    return eligible


def expected_wait_s(candidate: Candidate) -> float:
    """Return how long a newcomer would wait until its own prompt's turn."""
    load = candidate.load
    if load is None:
        return STAND_IN_S * candidate.num_inflight
    num_tokens = load.num_newcomer_tokens + candidate.num_unreported_tokens
    return num_tokens / _prefill_tps(candidate)


def _prefill_tps(candidate: Candidate) -> float:
    measured = candidate.load.prefill_tps if candidate.load is not None else 0.0
    return measured or UNMEASURED_TPS


def spare_deposit_s(candidate: Candidate) -> float:
    """Return what each paced reader will have in hand in `HORIZON_S`, if nothing else changes: what
    the engine makes beyond what is read is deposited.
    """
    load = candidate.load
    if load is None:
        return 0.0
    if load.reading_load_frac == 0.0:
        return float("inf")
    return load.deposit_s + HORIZON_S * (1.0 / load.reading_load_frac - 1.0)


def _home(conversation: bytes, candidates: Sequence[Candidate]) -> Candidate:
    """Return the executor that all gateways send a conversation's turns to, by rendezvous hashing:
    one that comes or goes moves its own share of the conversations.
    """
    return max(candidates, key=lambda one: blake2b(one.address.encode(), key=conversation).digest())
