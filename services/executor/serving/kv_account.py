"""The account of what holds KV, with the names that gateways gave their requests. Pure."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from heapq import nlargest

from services.executor.kv_holders import HoldingRequest, HoldingSession, KVHolders, KVUse
from services.executor.types import Holder, Submission
from services.placement.types import RequestPhase

RUN = (RequestPhase.PREFILL, RequestPhase.DECODING)
UNKNOWN = Holder()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRequest:
    """A live request, by its client's name."""

    holder: Holder
    holding: HoldingRequest


@dataclass(slots=True, kw_only=True)
class HoldingShare:
    """Sums over the live requests of an account and class."""

    account: str
    request_class: str
    num_requests: int = 0
    num_waiting: int = 0
    num_pool_tokens: int = 0
    num_host_tokens: int = 0
    num_shared_tokens: int = 0  # counted with each request
    num_recomputed_tokens: int = 0

    def add(self, holding: HoldingRequest) -> None:
        self.num_requests += 1
        self.num_waiting += holding.phase not in RUN
        self.num_pool_tokens += holding.use.num_pool_tokens
        self.num_host_tokens += holding.use.num_host_tokens
        self.num_shared_tokens += holding.use.num_shared_tokens
        self.num_recomputed_tokens += holding.num_recomputed_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class KVAccount:
    """What there is most of comes first; sums are over all requests."""

    requests: tuple[HeldRequest, ...]
    sessions: tuple[HoldingSession, ...]
    shares: tuple[HoldingShare, ...]
    num_requests: int
    num_sessions: int


def account_of(
    holders: KVHolders, submissions: Mapping[str, Submission], *, limit: int
) -> KVAccount:
    """Return the account with at most `limit` entries of a kind. `submissions` are by the engine's
    ids; requests without one, which no client has, are left out.
    """
    held = [
        HeldRequest(
            holder=submission.holder or UNKNOWN,
            holding=replace(holding, request_id=submission.request_id),
        )
        for holding in holders.requests
        if (submission := submissions.get(holding.request_id)) is not None
    ]
    shares = _shares(held)
    return KVAccount(
        requests=tuple(nlargest(limit, held, key=lambda one: _size(one.holding.use))),
        sessions=holders.sessions[:limit],
        shares=tuple(nlargest(limit, shares, key=_size)),
        num_requests=len(held),
        num_sessions=holders.num_sessions,
    )


def _shares(held: Iterable[HeldRequest]) -> Collection[HoldingShare]:
    shares: dict[tuple[str, str], HoldingShare] = {}
    for one in held:
        names = account, request_class = one.holder.account, one.holder.request_class
        empty = HoldingShare(account=account, request_class=request_class)
        shares.setdefault(names, empty).add(one.holding)
    return shares.values()


def _size(use: KVUse | HoldingShare) -> tuple[int, int]:
    return use.num_pool_tokens + use.num_shared_tokens, use.num_host_tokens
