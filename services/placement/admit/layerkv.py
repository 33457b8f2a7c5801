"""LayerKV's SLO-aware admission (arXiv 2410.00428, Algorithm 1, Eq. 1 and 2).

A prompt delays all that decode by the time that it takes. Each of them can bear, until its
answer ends at the lower bound of its predicted length,

    allow = T_tpot (N_past + N_future) - (T_past + T_future)                                  (1)

and prompts may begin as long as all of them together take less than the least of these (2).

The pseudo-code sums Eq. 4 over the queue, the text the time of a prefill: the text is meant, and
the measured time is taken. One request that is late whatever happens would stop admission until it
ends: it does not count (`counts_hopeless` counts it, as printed), but then prompts come one by one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from services.placement.run.step_estimate import compute_s
from services.placement.run.types import RunDecision, RunPhase, RunRequest, RunSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    """What Algorithm 1 leaves open."""

    counts_hopeless: bool = False
    interval_s: float = 0.1  # between looks while a request is kept out


DEFAULT_RULES = AdmissionRules()


def num_admitted(snapshot: RunSnapshot, rules: AdmissionRules = DEFAULT_RULES) -> int:
    """Return how many newcomers may begin their prompts, in the order of the queue."""
    new = [r for r in snapshot.requests if r.phase is RunPhase.NEW]
    costs = snapshot.costs
    begun = [r for r in snapshot.requests if r.has_begun]
    if costs is None or not costs.chunk_token_s or not begun:
        return len(new)
    step_s = compute_s(costs, [r for r in begun if r.runs])
    allowed = [allow_s(r, step_s) for r in begun if r.rate_tps]
    keepable = [one_s for one_s in allowed if one_s > 0.0 or rules.counts_hopeless]
    under_way = [r for r in snapshot.requests if r.runs and not r.has_begun]
    begun_s = sum(costs.prompt_s(r.num_prompt_left) for r in under_way)
    left_s = min(keepable, default=math.inf) - begun_s
    most = len(new)
    if len(keepable) < len(allowed):
        most = 0 if under_way else 1
    count = 0
    for request in new[:most]:
        left_s -= costs.prompt_s(request.num_prompt_left)
        if left_s <= 0.0:
            break
        count += 1
    return count


def allow_s(request: RunRequest, step_s: float) -> float:
    """Return Eq. 1 for a request with a rate: how long prompts may delay it, < 0: not at all."""
    num_past = request.num_output_tokens - 1  # the first is no decode
    num_future = max(1, request.least_answer_tokens - request.num_output_tokens)
    to_come_s = step_s / request.tokens_per_step * num_future
    return (num_past + num_future) / request.rate_tps - (request.decoding_s + to_come_s)


def with_slo_aware_admission(
    decide: Callable[[RunSnapshot], RunDecision], rules: AdmissionRules = DEFAULT_RULES
) -> Callable[[RunSnapshot], RunDecision]:
    """Return a run policy that takes in no more newcomers than Algorithm 1 lets begin."""

    def decided(snapshot: RunSnapshot) -> RunDecision:
        decision = decide(snapshot)
        waiting = {r.request_id for r in snapshot.requests if r.phase is RunPhase.NEW}
        new = [name for name in decision.run if name in waiting]
        held_back = frozenset(new[num_admitted(snapshot, rules) :])
        if not held_back:
            return decision
        return replace(
            decision,
            run=tuple(name for name in decision.run if name not in held_back),
            valid_for_s=min(decision.valid_for_s, rules.interval_s),
        )

    return decided
