"""A snapshot in the terms that every placement policy thinks in: demands, patterns, step time."""

import math
from collections.abc import Iterable, Mapping, Sequence

from services.placement.capacity import Demand, blocks_needed
from services.placement.latency import Fetch, step_timing
from services.placement.patterns import RESIDENT, Pattern, make_pattern
from services.placement.types import (
    EngineShape,
    Link,
    Placement,
    Profile,
    RequestId,
    RequestPhase,
    RequestState,
    Snapshot,
)

SEALING_STEPS = 2  # a full block leaves the pool this many steps after it is filled, at the latest


def members(snapshot: Snapshot) -> tuple[RequestState, ...]:
    """Return the requests that placement decides about, in scheduling order.

    They hold KV, and their reader reads: who is on hold stays paused whatever is decided.
    """
    return tuple(r for r in snapshot.requests if r.phase.holds_kv and not r.on_hold)


def capacity_blocks(snapshot: Snapshot) -> int:
    """Return the pool blocks that the members may use together.

    Free ones, their own, and those of requests on hold: a paused request gives its blocks up.
    """
    held = sum(sum(r.num_blocks) for r in snapshot.requests if r.phase.holds_kv)
    return snapshot.num_free_blocks + held


def demand_of(request: RequestState, engine: EngineShape, *, growth: int = 0) -> Demand:
    """Return a request's KV after `growth` more tokens.

    A prompt counts in full from the start: its blocks are needed before the window ends. Offloaded
    groups hold extra blocks: one while a block filled in the window is sealed, and the running
    chunk of a prefill.
    """
    num_tokens = request.num_tokens + growth
    first_new = request.num_tokens - SEALING_STEPS
    fills = num_tokens // engine.block_size > max(first_new, 0) // engine.block_size
    extra = int(fills and growth > 0)
    if request.phase is RequestPhase.PREFILL:
        left = request.num_prompt_tokens - request.num_computed_tokens
        extra += math.ceil(min(left, engine.max_num_batched_tokens) / engine.block_size)
    return Demand(
        num_tokens=num_tokens,
        block_size=engine.block_size,
        num_groups=engine.num_groups,
        num_extra_blocks=extra,
    )


def pool_need(demand: Demand, pattern: Pattern) -> int:
    return blocks_needed(
        demand, num_offloaded=pattern.num_offloaded, num_buffers=pattern.num_buffers
    )


def placed_pattern(placed: RequestState | Placement, engine: EngineShape) -> Pattern:
    """Return the pattern in force for a request, or of an answer, in layer groups."""
    groups = sorted({layer // engine.layers_per_group for layer in placed.offloaded_layers})
    return make_pattern(tuple(groups), max(1, placed.num_prefetch_buffers))


def may_offload(request: RequestState, engine: EngineShape, group: int) -> bool:
    """Say whether a group's full blocks are on the host, or are about to be.

    Only what is mirrored may leave the pool. A group that is already offloaded may stay so.
    """
    if group in placed_pattern(request, engine).offloaded:
        return True
    if group >= len(request.num_host_blocks):
        return request.num_tokens < engine.block_size
    num_full = request.num_computed_tokens // engine.block_size
    return request.num_host_blocks[group] >= num_full - SEALING_STEPS


def allowed_pattern(request: RequestState, engine: EngineShape, pattern: Pattern) -> bool:
    return all(may_offload(request, engine, group) for group in pattern.offloaded)


def placement_of(request: RequestState, engine: EngineShape, pattern: Pattern) -> Placement:
    """Return the answer for one running request."""
    layers = tuple(layer for group in pattern.offloaded for layer in engine.layers_of(group))
    return Placement(
        request_id=request.request_id,
        offloaded_layers=layers,
        num_prefetch_buffers=pattern.num_buffers,
    )


def unchanged(request: RequestState, *, paused: bool) -> Placement:
    """Return the answer that leaves a request's layers where they are."""
    return Placement(
        request_id=request.request_id,
        offloaded_layers=request.offloaded_layers,
        num_prefetch_buffers=request.num_prefetch_buffers,
        paused=paused,
    )


def answer(
    snapshot: Snapshot, patterns: Mapping[RequestId, Pattern], paused: Iterable[RequestId]
) -> tuple[Placement, ...]:
    """Return one placement per request of the snapshot.

    Requests in neither argument hold no KV, or nothing is decided about them: left as they are.
    """
    held = set(paused)
    return tuple(
        placement_of(request, snapshot.engine, patterns[request.request_id])
        if request.request_id in patterns
        else unchanged(request, paused=request.request_id in held or _stays_paused(request))
        for request in snapshot.requests
    )


def _stays_paused(request: RequestState) -> bool:
    return request.on_hold and request.phase.holds_kv


def group_compute_s(
    engine: EngineShape, profile: Profile, *, num_tokens: int, num_context_tokens: int
) -> list[float]:
    """Return the compute time of each layer group in a step."""
    layer_s = profile.layer_s(num_tokens, num_context_tokens)
    return [len(engine.layers_of(group)) * layer_s for group in range(engine.num_groups)]


def fetch_s(demand: Demand, engine: EngineShape, link: Link) -> float:
    """Return how long the link needs for one offloaded group of a request (tau_r)."""
    return link.copy_s(demand.num_full_blocks * engine.block_bytes)


def predicted_step_s(
    snapshot: Snapshot, batch: Sequence[tuple[RequestState, Pattern]], *, growth: int = 0
) -> float:
    """Return the predicted length of a decode step of `batch`, `growth` tokens from now.

    The snapshot has a profile and a host-to-GPU link.
    """
    assert snapshot.profile is not None
    assert snapshot.h2d is not None
    engine = snapshot.engine
    demands = [demand_of(request, engine, growth=growth) for request, _ in batch]
    compute_s = group_compute_s(
        engine,
        snapshot.profile,
        num_tokens=len(batch),
        num_context_tokens=sum(demand.num_tokens for demand in demands),
    )
    fetches = [
        Fetch(pattern=pattern, layer_s=fetch_s(demand, engine, snapshot.h2d))
        for demand, (_, pattern) in zip(demands, batch, strict=True)
        if pattern != RESIDENT
    ]
    return snapshot.profile.outside_layers_s + step_timing(compute_s, fetches).total_s
