"""What one snapshot asks of the solver: promises that can be kept, and patterns to choose from."""

from dataclasses import replace

from services.placement.judging.slo import promise_of
from services.placement.mirror import mirror_of
from services.placement.step_time.batch import (
    holders_of,
    members,
    placed_pattern,
    predicted_step_s,
)
from services.placement.step_time.patterns import RESIDENT, PatternSpace, spread_over
from services.placement.types import RequestState, Snapshot
from services.planner.solver.library import PatternLibrary, extended_library, pattern_library

MAX_EXTRA_PATTERNS = 64  # beyond the space; more would cost the search more than they give


def library_for(snapshot: Snapshot, space: PatternSpace) -> PatternLibrary:
    """Return the space with what this snapshot adds, the same for the same snapshot.

    Added are the patterns in force, so that keeping the plan is always a candidate, and for each
    holder of which only some layers may be offloaded the even spreads over these.
    """
    groups, mirror = snapshot.engine.num_groups, mirror_of(snapshot)
    holders = holders_of(snapshot, members(snapshot))
    wanted = dict.fromkeys(placed_pattern(holder, snapshot.engine) for holder in holders)
    for holder in holders:
        offloadable = mirror.offloadable(holder)
        if 0 < len(offloadable) < groups:
            wanted |= dict.fromkeys(spread_over(offloadable, space))
    known = pattern_library(groups, space).index
    extra = tuple(pattern for pattern in wanted if pattern not in known)
    return extended_library(groups, space, extra[:MAX_EXTRA_PATTERNS])


def without_hopeless(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot without SLOs that nothing could keep: they bind no request.

    An SLO is hopeless if a step with this request alone, all of its KV in the pool, takes longer.
    A request that states one gains nothing by it, and costs no other reader a pause.
    """
    requests = tuple(
        replace(request, slo_tbt_s=None, slo_tpot_s=None)
        if _is_hopeless(request, snapshot)
        else request
        for request in snapshot.requests
    )
    return snapshot if requests == snapshot.requests else replace(snapshot, requests=requests)


def _is_hopeless(request: RequestState, snapshot: Snapshot) -> bool:
    promise = promise_of(request, deposit=False)
    if promise is None:
        return False
    resident = [(holder, RESIDENT) for holder in holders_of(snapshot, [request])]
    return promise.interval_s < predicted_step_s(snapshot, resident)
