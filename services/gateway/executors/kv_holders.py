"""What holds the KV of all executors, as JSON: joined, most tokens first, and cut. Pure."""

from collections.abc import Iterable, Mapping

from typing_extensions import TypedDict  # pydantic takes no other on Python 3.11

from evenflow.executor.v1 import executor_pb2 as pb
from services.kit.rpc import name_of_request

_STATES = {
    value: name.removeprefix("REQUEST_STATE_").lower() for name, value in pb.RequestState.items()
}


class HoldingExecutor(TypedDict):
    """An executor, and how much it has."""

    executor: str
    is_connected: bool  # False: it does not answer, and nothing else is told of it
    num_requests: int
    num_sessions: int


class HoldingShare(TypedDict):
    """Live requests of one API key and class, at all executors. Tokens are of all layers."""

    api_key: str
    request_class: str
    num_requests: int
    num_waiting: int
    num_pool_tokens: int
    num_host_tokens: int
    num_shared_tokens: int  # counted with each request
    num_recomputed_tokens: int


class HoldingRequest(TypedDict):
    """A live request, and where its KV is."""

    request_id: str
    executor: str
    api_key: str
    session_id: str
    request_class: str
    priority: int
    state: str
    why: str
    why_text: str
    waited_s: float
    num_pool_tokens: int
    num_host_tokens: int
    num_shared_tokens: int
    num_recomputed_tokens: int


class HoldingSession(TypedDict):
    """What is kept for a session whose requests have ended; null: not counted."""

    session_id: str
    executor: str
    api_key: str
    num_retained_tokens: int
    num_pool_tokens: int | None
    num_host_tokens: int | None
    retained_for_s: float | None


class KVHolders(TypedDict):
    """What holds KV. Lists but the executors' begin with the largest, and are cut."""

    executors: list[HoldingExecutor]
    shares: list[HoldingShare]
    requests: list[HoldingRequest]
    sessions: list[HoldingSession]


EXAMPLE: KVHolders = {
    "executors": [
        {
            "executor": "executor-0:50051",
            "is_connected": True,
            "num_requests": 1,
            "num_sessions": 1,
        }
    ],
    "shares": [
        {
            "api_key": "alice",
            "request_class": "agent",
            "num_requests": 1,
            "num_waiting": 1,
            "num_pool_tokens": 0,
            "num_host_tokens": 8_192,
            "num_shared_tokens": 0,
            "num_recomputed_tokens": 12,
        }
    ],
    "requests": [
        {
            "request_id": "9f2c4e",
            "executor": "executor-0:50051",
            "api_key": "alice",
            "session_id": "agent-7",
            "request_class": "agent",
            "priority": 0,
            "state": "parked",
            "why": "no_room",
            "why_text": "there is no room for it yet",
            "waited_s": 1.5,
            "num_pool_tokens": 0,
            "num_host_tokens": 8_192,
            "num_shared_tokens": 0,
            "num_recomputed_tokens": 12,
        }
    ],
    "sessions": [
        {
            "session_id": "agent-3",
            "executor": "executor-0:50051",
            "api_key": "alice",
            "num_retained_tokens": 4_096,
            "num_pool_tokens": 512,
            "num_host_tokens": 4_096,
            "retained_for_s": 280.0,
        }
    ],
}


def kv_holders(answers: Mapping[str, pb.GetKVHoldersResponse | None], *, limit: int) -> KVHolders:
    """Return one account of executors, by their addresses, with what each tells; None: it does not
    answer. Of what there are more than `limit` of, the largest are told.
    """
    told = {address: answer for address, answer in answers.items() if answer is not None}
    requests = [_request(at, one) for at, answer in told.items() for one in answer.requests]
    sessions = [_session(at, one) for at, answer in told.items() for one in answer.sessions]
    return {
        "executors": [_executor(address, answer) for address, answer in answers.items()],
        "shares": sorted(_joined(told.values()), key=_size)[:limit],
        "requests": sorted(requests, key=_size)[:limit],
        "sessions": sorted(sessions, key=lambda one: -one["num_retained_tokens"])[:limit],
    }


def _size(entry: HoldingShare | HoldingRequest) -> tuple[int, int]:
    """Return what sorts the largest first: by what is in the pool, then on the host."""
    return -entry["num_pool_tokens"] - entry["num_shared_tokens"], -entry["num_host_tokens"]


def _executor(address: str, answer: pb.GetKVHoldersResponse | None) -> HoldingExecutor:
    told = answer or pb.GetKVHoldersResponse()
    return {
        "executor": address,
        "is_connected": answer is not None,
        "num_requests": told.num_requests,
        "num_sessions": told.num_sessions,
    }


def _joined(answers: Iterable[pb.GetKVHoldersResponse]) -> Iterable[HoldingShare]:
    """Return the sums over executors of each key and class."""
    joined: dict[tuple[str, str], pb.HoldingShare] = {}
    for share in (share for answer in answers for share in answer.shares):
        names = (share.account, share.request_class)
        sums = joined.setdefault(
            names, pb.HoldingShare(account=share.account, request_class=share.request_class)
        )
        sums.num_requests += share.num_requests
        sums.num_waiting += share.num_waiting
        sums.num_pool_tokens += share.num_pool_tokens
        sums.num_host_tokens += share.num_host_tokens
        sums.num_shared_tokens += share.num_shared_tokens
        sums.num_recomputed_tokens += share.num_recomputed_tokens
    return map(_share, joined.values())


def _share(share: pb.HoldingShare) -> HoldingShare:
    return {
        "api_key": share.account,
        "request_class": share.request_class,
        "num_requests": share.num_requests,
        "num_waiting": share.num_waiting,
        "num_pool_tokens": share.num_pool_tokens,
        "num_host_tokens": share.num_host_tokens,
        "num_shared_tokens": share.num_shared_tokens,
        "num_recomputed_tokens": share.num_recomputed_tokens,
    }


def _request(address: str, request: pb.HoldingRequest) -> HoldingRequest:
    return {
        "request_id": name_of_request(request.request_id),
        "executor": address,
        "api_key": request.holder.account,
        "session_id": request.holder.session_id,
        "request_class": request.holder.request_class,
        "priority": request.priority,
        "state": _STATES.get(request.state, "unknown"),
        "why": request.why,
        "why_text": request.why_text,
        "waited_s": request.waited_s,
        "num_pool_tokens": request.num_pool_tokens,
        "num_host_tokens": request.num_host_tokens,
        "num_shared_tokens": request.num_shared_tokens,
        "num_recomputed_tokens": request.num_recomputed_tokens,
    }


def _session(address: str, session: pb.HoldingSession) -> HoldingSession:
    is_counted = session.HasField("retained_for_s")
    return {
        "session_id": session.session_id,
        "executor": address,
        "api_key": session.account,
        "num_retained_tokens": session.num_retained_tokens,
        "num_pool_tokens": session.num_pool_tokens if is_counted else None,
        "num_host_tokens": session.num_host_tokens if is_counted else None,
        "retained_for_s": session.retained_for_s if is_counted else None,
    }
