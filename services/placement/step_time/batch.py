"""A snapshot in the terms that every placement policy thinks in: demands, patterns, step time."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from services.placement.capacity import Demand, blocks_needed
from services.placement.step_time.latency import Fetch, step_timing
from services.placement.step_time.patterns import RESIDENT, Pattern, make_pattern
from services.placement.step_time.prefill import Progress, largest_chunk, progress_of
from services.placement.types import (
    EngineShape,
    Link,
    Placement,
    Profile,
    RequestId,
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
    extra += math.ceil(largest_chunk(request, engine) / engine.block_size)
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


@cache
def group_sizes(num_layers: int, layers_per_group: int) -> tuple[int, ...]:
    """Return the layers of each layer group."""
    firsts = range(0, num_layers, layers_per_group)
    return tuple(min(layers_per_group, num_layers - first) for first in firsts)


def step_compute_s(
    engine: EngineShape, profile: Profile, progress: Sequence[Progress], step: int
) -> list[float]:
    """Return the compute time of each layer group in step `step`, counted from 0."""
    decodes = [one.tokens_read_at(step) for one in progress if one.decodes_at(step)]
    chunks_s = sum(
        chunk_layer_s(engine, profile, chunk=chunk, num_read=one.tokens_read_at(step))
        for one in progress
        if (chunk := one.chunk_at(step))
    )
    decode_s = group_compute_s(
        engine, profile, num_tokens=len(decodes), num_context_tokens=sum(decodes)
    )
    sizes = group_sizes(engine.num_layers, engine.layers_per_group)
    return [s + size * chunks_s for size, s in zip(sizes, decode_s, strict=True)]


def group_compute_s(
    engine: EngineShape, profile: Profile, *, num_tokens: int, num_context_tokens: int
) -> list[float]:
    """Return the compute time of each layer group in a step that computes no prompt."""
    layer_s = profile.layer_s(num_tokens, num_context_tokens)
    return [size * layer_s for size in group_sizes(engine.num_layers, engine.layers_per_group)]


def chunk_layer_s(engine: EngineShape, profile: Profile, *, chunk: int, num_read: int) -> float:
    """Return what a chunk of a prompt adds to each layer's time.

    By the measured prefill time, or where there is none by the times of a step's tokens.
    """
    if profile.prefill_s_per_token > 0.0:
        return chunk * profile.prefill_s_per_token / engine.num_layers
    reads = num_read * profile.layer_s_per_context_token
    return chunk * profile.layer_s_per_token + reads


def fetch_s(demand: Demand, engine: EngineShape, link: Link) -> float:
    """Return how long the link needs for one offloaded group of a request (tau_r)."""
    return link.copy_s(demand.num_full_blocks * engine.block_bytes)


def predicted_step_s(
    snapshot: Snapshot, batch: Sequence[tuple[RequestState, Pattern]], *, growth: int = 0
) -> float:
    """Return the predicted length of a step of `batch`, `growth` steps from now.

    Prompts under computation advance by their chunks. The snapshot has a profile and a
    host-to-GPU link.
    """
    assert snapshot.profile is not None
    assert snapshot.h2d is not None
    engine, link = snapshot.engine, snapshot.h2d
    progress = progress_of([request for request, _ in batch], engine)
    fetches = [
        Fetch(pattern=pattern, layer_s=fetch_s(_read_at(one, engine, growth), engine, link))
        for one, (_, pattern) in zip(progress, batch, strict=True)
        if pattern != RESIDENT
    ]
    compute_s = step_compute_s(engine, snapshot.profile, progress, growth)
    return snapshot.profile.outside_layers_s + step_timing(compute_s, fetches).total_s


def _read_at(progress: Progress, engine: EngineShape, step: int) -> Demand:
    return Demand(
        num_tokens=progress.tokens_read_at(step),
        block_size=engine.block_size,
        num_groups=engine.num_groups,
    )
