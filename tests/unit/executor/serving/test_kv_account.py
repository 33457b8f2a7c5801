"""The account of what holds KV, by clients' names."""

import json
from typing import Any

from services.executor.kv_holders import (
    HoldingRequest,
    HoldingSession,
    KVHolders,
    KVUse,
    from_plain,
    to_plain,
)
from services.executor.serving.kv_account import account_of
from services.executor.types import Holder, Submission
from services.generation.prompts import TextPrompt
from services.placement.run.reason import Reason
from services.placement.types import RequestPhase

AGENT = Holder(account="alice", session_id="s", request_class="agent")
SESSION = HoldingSession(account="alice", session_id="s", num_retained_tokens=64)


def make_holding(request_id: str, use: KVUse | None = None, **overrides: Any) -> HoldingRequest:
    fields = {
        "phase": RequestPhase.DECODING,
        "priority": 0,
        "why": Reason.STAYS,
        "waited_s": 0.0,
        "num_recomputed_tokens": 0,
    }
    return HoldingRequest(request_id=request_id, use=use or KVUse(), **{**fields, **overrides})


def make_submissions(**holders: Holder | None) -> dict[str, Submission]:
    """Return submissions of requests that the engine knows by a name of its own."""
    return {
        f"{name}-x": Submission(
            request_id=name, generation=1, model="m", prompt=TextPrompt("hi"), holder=holder
        )
        for name, holder in holders.items()
    }


def test_an_account_survives_the_way_between_processes() -> None:
    holders = KVHolders(
        requests=(make_holding("a", KVUse(num_pool_tokens=8, num_shared_tokens=4)),),
        sessions=(SESSION,),
        num_sessions=3,
    )
    assert from_plain(json.loads(json.dumps(to_plain(holders)))) == holders


def test_requests_have_their_clients_names_and_the_largest_come_first() -> None:
    holders = KVHolders(
        requests=(
            make_holding("small-x", KVUse(num_pool_tokens=8, num_host_tokens=800)),
            make_holding("shares-x", KVUse(num_pool_tokens=8, num_shared_tokens=8)),
            make_holding("copied-x", KVUse(num_pool_tokens=8, num_host_tokens=900)),
            make_holding("gone-x", KVUse(num_pool_tokens=99)),  # no client has it any more
        ),
        sessions=(SESSION, SESSION),
        num_sessions=2,
    )
    submissions = make_submissions(small=AGENT, shares=None, copied=AGENT)

    account = account_of(holders, submissions, limit=2)

    assert [one.holding.request_id for one in account.requests] == ["shares", "copied"]
    assert [one.holder for one in account.requests] == [Holder(), AGENT]
    assert (account.num_requests, account.num_sessions) == (3, 2)
    assert account_of(holders, submissions, limit=1).sessions == (SESSION,)


def test_sums_are_over_all_requests_of_a_key_and_class() -> None:
    use = KVUse(num_pool_tokens=10, num_host_tokens=20, num_shared_tokens=30)
    other = Holder(account="alice", session_id="t", request_class="agent")
    holders = KVHolders(
        requests=(
            make_holding("a-x", use, num_recomputed_tokens=5),
            make_holding("b-x", use, phase=RequestPhase.PREEMPTED, num_recomputed_tokens=6),
            make_holding("c-x", phase=RequestPhase.PREFILL),
        )
    )
    batch = Holder(account="alice", request_class="batch")

    agents, rest = account_of(holders, make_submissions(a=AGENT, b=other, c=batch), limit=2).shares

    assert (agents.account, agents.request_class) == ("alice", "agent")
    assert (agents.num_requests, agents.num_waiting) == (2, 1)
    assert (agents.num_pool_tokens, agents.num_host_tokens) == (20, 40)
    assert (agents.num_shared_tokens, agents.num_recomputed_tokens) == (60, 11)
    assert (rest.request_class, rest.num_requests, rest.num_waiting) == ("batch", 1, 0)
