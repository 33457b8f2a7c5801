"""What a plan comes to."""

from services.placement.step_time.batch import demand_of, placed_by, pool_need
from services.placement.types import Plan, RequestState, Snapshot


def offloaded(plan: Plan) -> list[int]:
    """Return the number of offloaded layers of each request."""
    return [len(placement.offloaded_layers) for placement in plan.placements]


def running(snapshot: Snapshot, plan: Plan) -> list[RequestState]:
    """Return the requests with KV that a plan does not pause."""
    placed = zip(snapshot.requests, plan.placements, strict=True)
    return [r for r, placement in placed if r.phase.holds_kv and not placement.paused]


def used_blocks(snapshot: Snapshot, plan: Plan) -> int:
    return sum(
        pool_need(demand_of(holder, snapshot.engine, growth=1), pattern)
        for holder, pattern in placed_by(plan, snapshot, running(snapshot, plan))
    )
