"""The patterns that one snapshot is planned with."""

from services.placement.mirror import mirror_of
from services.placement.step_time.batch import members, placed_pattern
from services.placement.step_time.patterns import PatternSpace, spread_over
from services.placement.types import Snapshot
from services.planner.solver.library import PatternLibrary, extended_library, pattern_library

MAX_EXTRA_PATTERNS = 64  # beyond the space; more would cost the search more than they give


def library_for(snapshot: Snapshot, space: PatternSpace) -> PatternLibrary:
    """Return the space with what this snapshot adds, the same for the same snapshot.

    Added are the patterns in force, so that keeping the plan is always a candidate, and for each
    request of which only some layers may be offloaded the even spreads over these.
    """
    groups, batch, mirror = snapshot.engine.num_groups, members(snapshot), mirror_of(snapshot)
    wanted = dict.fromkeys(placed_pattern(request, snapshot.engine) for request in batch)
    for request in batch:
        offloadable = mirror.offloadable(request)
        if 0 < len(offloadable) < groups:
            wanted |= dict.fromkeys(spread_over(offloadable, space))
    known = pattern_library(groups, space).index
    extra = tuple(pattern for pattern in wanted if pattern not in known)
    return extended_library(groups, space, extra[:MAX_EXTRA_PATTERNS])
