"""Requests that are larger than the pool: one at a time runs alone, for a turn beside the queue."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from services.placement.run.evenflow_rules import EvenflowRules
from services.placement.run.reason import Reason
from services.placement.run.types import RunDecision, RunRequest, RunSnapshot
from services.placement.types import RequestId


def decide_beside(
    large: Sequence[RunRequest],
    snapshot: RunSnapshot,
    rules: EvenflowRules,
    decide: Callable[[RunSnapshot], RunDecision],
) -> RunDecision:
    """Give a turn to one of `large`, or return what is decided on the others.

    One runs while no other request wants to, or when it has waited for long; then for one turn.
    """
    others = [request for request in snapshot.requests if request not in large]
    now = next((request for request in large if request.runs), None)
    first = now or max(large, key=_waited_s)
    if now is None:
        has_turn = _waited_s(first) > rules.aside_patience_s and all(
            r.has_begun and snapshot.is_saved(r, unsaved_blocks=rules.unsaved_blocks)
            for r in others
            if r.runs
        )
    else:
        turn_s = rules.aside_turn_s if now.num_parks else rules.aside_leave_s
        has_turn = not now.has_begun or now.run_age_s < turn_s
    if has_turn or not others:
        return RunDecision(
            run=(first.request_id,),
            park=frozenset(r.request_id for r in snapshot.requests if r.runs and r is not first),
            offloads=True,
            valid_for_s=rules.period_s,
            reasons=_reasons(first, snapshot.requests, large),
        )
    decision = decide(replace(snapshot, requests=tuple(others)))
    return replace(
        decision,
        park=decision.park | {r.request_id for r in large if r.runs},
        reasons={**decision.reasons, **{r.request_id: Reason.TOO_LARGE for r in large}},
    )


def _reasons(
    first: RunRequest, requests: Sequence[RunRequest], large: Sequence[RunRequest]
) -> dict[RequestId, Reason]:
    """Return why `first` runs alone, and the others wait."""
    reasons = {r.request_id: Reason.OTHERS_TURN for r in requests}
    reasons |= {r.request_id: Reason.TOO_LARGE for r in large}
    return reasons | {first.request_id: Reason.TURN}


def _waited_s(request: RunRequest) -> float:
    return max(0.0, -request.slack_s) if request.has_begun else request.arrival_age_s
