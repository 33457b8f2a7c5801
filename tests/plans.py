"""What a plan comes to."""

from services.placement.step_time.batch import demand_of, placed_pattern, pool_need
from services.placement.types import Plan, Snapshot


def offloaded(plan: Plan) -> list[int]:
    """Return the number of offloaded layers of each request."""
    return [len(placement.offloaded_layers) for placement in plan.placements]


def used_blocks(snapshot: Snapshot, plan: Plan) -> int:
    return sum(
        pool_need(
            demand_of(request, snapshot.engine, growth=1), placed_pattern(placed, snapshot.engine)
        )
        for request, placed in zip(snapshot.requests, plan.placements, strict=True)
        if not placed.paused
    )
