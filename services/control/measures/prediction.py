"""How long the next decode step should take, by the planner's own model."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.placement.step_time.latency import Fetch, step_timing
from services.placement.step_time.patterns import make_pattern
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
    num_context_tokens = sum(request.num_tokens for request in batch)
    layer_s = profile.layer_s(len(batch), num_context_tokens)
    compute_s = [len(engine.layers_of(group)) * layer_s for group in range(engine.num_groups)]
    fetches = [
        Fetch(
            pattern=make_pattern(request.offloaded, request.num_buffers),
            layer_s=h2d.copy_s(request.num_tokens // engine.block_size * engine.block_bytes),
        )
        for request in batch
        if request.offloaded and h2d is not None
    ]
    if not fetches:
        return profile.outside_layers_s + sum(compute_s)
    return profile.outside_layers_s + step_timing(compute_s, fetches).total_s
