"""Carries out what a plan says about one request's layers."""

from services.placement.layer_placement import LayerPlacement
from services.placement.plan_rules import groups_of
from services.placement.types import EngineShape, Placement
from simulator.guard import Guard


def place(placement: Placement, shape: EngineShape, guard: Guard) -> None:
    """Say where a request's groups belong, from the next step on."""
    groups = frozenset(groups_of(placement.offloaded_layers, shape))
    if groups:
        buffers = max(1, placement.num_prefetch_buffers)
        guard.given[placement.request_id] = LayerPlacement(offloaded=groups, num_staging=buffers)
    else:
        guard.given.pop(placement.request_id, None)
