"""How long the next decode step should take, by the planner's own model."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.placement.batch import fetch_s, group_compute_s
from services.placement.capacity import Demand
from services.placement.latency import Fetch, step_timing
from services.placement.patterns import make_pattern
from services.placement.types import EngineShape, Link, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRequest:
    """One request of a step and where its KV is."""

    num_tokens: int  # of KV that the step reads
    offloaded: tuple[int, ...] = ()  # layer groups in host memory, ascending
    num_buffers: int = 0  # staging buffers


def predicted_step_s(
    batch: Sequence[PlacedRequest], engine: EngineShape, profile: Profile, h2d: Link | None
) -> float:
    """Return the predicted length of a decode step of `batch`.

    Without a measured link copies count as nothing.
    """
    compute_s = group_compute_s(
        engine,
        profile,
        num_tokens=len(batch),
        num_context_tokens=sum(request.num_tokens for request in batch),
    )
    fetches = [
        Fetch(
            pattern=make_pattern(request.offloaded, request.num_buffers),
            layer_s=fetch_s(_demand(request, engine), engine, h2d),
        )
        for request in batch
        if request.offloaded and h2d is not None
    ]
    if not fetches:
        return profile.outside_layers_s + sum(compute_s)
    return profile.outside_layers_s + step_timing(compute_s, fetches).total_s


def _demand(request: PlacedRequest, engine: EngineShape) -> Demand:
    return Demand(
        num_tokens=request.num_tokens, block_size=engine.block_size, num_groups=engine.num_groups
    )
