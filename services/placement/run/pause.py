"""Which requests to pause, and which must run (OrbitFlow, section 3.4; victims as in its Fig. 14c).

Liveness: no request is paused for an SLO once it has waited `max_pause_s`, the SLO yields first; a
pause lasts `min_pause_s` unless a request completes; one just resumed is not paused again at
once. Only the pool's size overrides these.
"""

import hashlib
from collections.abc import Callable, Sequence

from services.placement.types import (
    PolicyParameters,
    RequestPhase,
    RequestState,
    Snapshot,
    VictimRule,
)


def must_stay_paused(request: RequestState, snapshot: Snapshot) -> bool:
    """Say whether a pause is too young to end."""
    if request.phase is not RequestPhase.PAUSED or request.paused_age_s is None:
        return False
    completion_s = snapshot.last_completion_age_s
    if completion_s is not None and completion_s < request.paused_age_s:
        return False
    parameters = snapshot.parameters
    return request.paused_age_s < min(parameters.min_pause_s, parameters.max_pause_s)


def is_protected(request: RequestState, parameters: PolicyParameters) -> bool:
    """Say whether a request may not be paused for an SLO."""
    if request.phase is RequestPhase.PREFILL:
        return True
    if request.phase is RequestPhase.PAUSED:
        return (request.paused_age_s or 0.0) >= parameters.max_pause_s
    resumed_s = request.resumed_age_s
    return resumed_s is not None and resumed_s < parameters.min_pause_s


def ranked_victims(
    requests: Sequence[RequestState], rule: VictimRule, *, seed: int
) -> list[RequestState]:
    """Return requests in the order in which to pause them, less important ones first."""
    keys: dict[VictimRule, Callable[[RequestState], float]] = {
        VictimRule.KV_AND_DEPOSIT: lambda r: -(r.num_tokens + r.num_deposited_tokens),
        VictimRule.LONGEST: lambda r: -r.num_tokens,
        VictimRule.SHORTEST: lambda r: r.num_tokens,
        VictimRule.RANDOM: lambda r: _draw(seed, r.request_id),
    }
    return sorted(requests, key=lambda r: (-r.priority, keys[rule](r), r.request_id))


def _draw(seed: int, request_id: str) -> float:
    """Return a number in [0, 1) that the seed and the id decide, whoever else is in the batch."""
    digest = hashlib.blake2b(f"{seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def longest_paused(requests: Sequence[RequestState]) -> RequestState:
    """Return the request that resumes first where only paused requests are left."""
    return max(requests, key=lambda r: (-r.priority, r.paused_age_s or 0.0))
