"""Carries out what a plan says about one request's layers."""

from services.placement.layer_placement import LayerPlacement
from services.placement.types import EngineShape, Placement
from simulator.guard import Guard


def groups_of(placement: Placement, shape: EngineShape) -> frozenset[int]:
    """Return the layer groups that a placement wants on the host."""
    return frozenset(layer // shape.layers_per_group for layer in placement.offloaded_layers)


def place(placement: Placement, shape: EngineShape, guard: Guard) -> None:
    """Say where a request's groups belong, from the next step on."""
    groups = groups_of(placement, shape)
    if groups:
        buffers = max(1, placement.num_prefetch_buffers)
        guard.given[placement.request_id] = LayerPlacement(offloaded=groups, num_staging=buffers)
    else:
        guard.given.pop(placement.request_id, None)
