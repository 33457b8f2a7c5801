"""Requests that are larger than the pool: one at a time runs, for a turn beside the queue.

Those that share with it what is so large run with it: a step loads that once for all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from services.placement.run.evenflow_rules import EvenflowRules
from services.placement.run.reason import Reason
from services.placement.run.step_estimate import Steps
from services.placement.run.types import RunDecision, RunRequest, RunSnapshot
from services.placement.types import RequestId


def decide_beside(
    large: Sequence[RunRequest],
    snapshot: RunSnapshot,
    rules: EvenflowRules,
    decide: Callable[[RunSnapshot], RunDecision],
) -> RunDecision:
    """Give a turn to one of `large` and those that share with it, or return `decide` of the others.

    One runs while no other request wants to, or when it has waited for long; then for one turn.
    Where whoever leaves is computed again, it runs to its end, and others are sent away for it.
    """
    others = [request for request in snapshot.requests if request not in large]
    now = next((request for request in large if request.runs), None)
    first = now or max(large, key=_waited_s)
    if now is None:
        has_turn = _waited_s(first) > rules.aside_patience_s and all(
            r.has_begun
            and (
                snapshot.is_nothing_kept
                or snapshot.is_saved(r, unsaved_blocks=rules.unsaved_blocks)
            )
            for r in others
            if r.runs
        )
    elif snapshot.is_nothing_kept:
        has_turn = True
    else:
        turn_s = rules.aside_turn_s if now.num_parks else rules.aside_leave_s
        has_turn = not now.has_begun or now.run_age_s < turn_s
    if has_turn or not others:
        batch = _together(first, large, snapshot, rules)
        return RunDecision(
            run=tuple(r.request_id for r in batch),
            park=frozenset(r.request_id for r in snapshot.requests if r.runs and r not in batch),
            offloads=True,
            valid_for_s=rules.period_s,
            reasons=_reasons(batch, snapshot.requests, large),
        )
    decision = decide(replace(snapshot, requests=tuple(others)))
    return replace(
        decision,
        park=decision.park | {r.request_id for r in large if r.runs},
        reasons={**decision.reasons, **{r.request_id: Reason.TOO_LARGE for r in large}},
    )


def _together(
    first: RunRequest, large: Sequence[RunRequest], snapshot: RunSnapshot, rules: EvenflowRules
) -> list[RunRequest]:
    """Return `first` and those that begin alike, as long as more tokens per second come of it."""
    batch, steps = [first], Steps(snapshot)
    alike = [r for r in large if r is not first and not set(first.prefixes).isdisjoint(r.prefixes)]
    for request in alike if snapshot.costs is not None else ():
        growth = 0 if request.runs else rules.growth_tokens
        more = [*batch, request]
        if len(more) > snapshot.engine.max_num_seqs:
            break
        more_s, before_s = (steps.decode_s(one, growth=growth) for one in (more, batch))
        if len(batch) * more_s < len(more) * before_s:
            batch = more
    return batch


def _reasons(
    batch: Sequence[RunRequest], requests: Sequence[RunRequest], large: Sequence[RunRequest]
) -> dict[RequestId, Reason]:
    """Return why the batch runs without the others, and these wait."""
    reasons = {r.request_id: Reason.OTHERS_TURN for r in requests}
    reasons |= {r.request_id: Reason.TOO_LARGE for r in large}
    return reasons | {r.request_id: Reason.TURN for r in batch}


def _waited_s(request: RunRequest) -> float:
    return max(0.0, -request.slack_s) if request.has_begun else request.arrival_age_s
