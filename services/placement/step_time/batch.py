"""A snapshot in the terms that every placement policy thinks in: demands, patterns, step time."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from services.placement.capacity import Demand, blocks_needed
from services.placement.step_time.latency import Fetch, step_timing
from services.placement.step_time.patterns import RESIDENT, Pattern, make_pattern
from services.placement.step_time.prefill import Progress, largest_chunk, progress_of
from services.placement.types import (
    EngineShape,
    Holder,
    Link,
    Placement,
    Plan,
    PlanStatus,
    PrefixPlacement,
    PrefixState,
    Profile,
    RequestId,
    RequestState,
    Snapshot,
)

SEALING_STEPS = 2  # a full block leaves the pool this many steps after it is filled, at the latest


def sealing_tokens(engine: EngineShape) -> int:
    """Return how many tokens a request may have more by the time that a full block has left."""
    return SEALING_STEPS * (1 + engine.max_ahead_tokens)


def members(snapshot: Snapshot) -> tuple[RequestState, ...]:
    """Return the requests that placement decides about, in scheduling order.

    They hold KV, and their reader reads: one on hold stays paused whatever is decided.
    """
    return tuple(r for r in snapshot.requests if r.phase.holds_kv and not r.on_hold)


def holders_of(snapshot: Snapshot, requests: Sequence[RequestState]) -> tuple[Holder, ...]:
    """Return requests and the prefixes that they begin with, each once, before its first user."""
    prefixes = {prefix.prefix_id: prefix for prefix in snapshot.prefixes}
    if not prefixes:
        return tuple(requests)
    found = dict[str, Holder]()
    for request in requests:
        found |= {name: prefixes[name] for name in request.prefix_ids if name not in found}
        found[request.request_id] = request
    return tuple(found.values())


def capacity_blocks(snapshot: Snapshot) -> int:
    """Return the pool blocks that the members may use together, with the prefixes they begin with.

    Free ones, their own, and those of requests on hold: a paused request gives its blocks up.
    """
    holding = [r for r in snapshot.requests if r.phase.holds_kv]
    held = sum(sum(one.num_blocks) for one in holders_of(snapshot, holding))
    return snapshot.num_free_blocks + held


def demand_of(holder: Holder, engine: EngineShape, *, growth: int = 0) -> Demand:
    """Return a holder's KV after `growth` more steps; a prefix does not grow.

    A prompt counts in full from the start: its blocks are needed before the window ends. Offloaded
    groups hold extra blocks: one while a block filled in the window is sealed, and the running
    chunk of a prefill.
    """
    ahead = engine.max_ahead_tokens
    if isinstance(holder, PrefixState):
        growth = ahead = 0
    else:
        growth = holder.growth(growth)
    num_tokens = holder.num_tokens + growth
    first_new = holder.num_tokens - sealing_tokens(engine)
    fills = num_tokens // engine.block_size > max(first_new, 0) // engine.block_size
    extra = int(fills and growth > 0)
    extra += math.ceil(largest_chunk(holder, engine) / engine.block_size)
    return Demand(
        num_tokens=num_tokens,
        block_size=engine.block_size,
        num_groups=engine.num_groups,
        num_extra_blocks=extra,
        num_ahead=ahead,
    )


def pool_need(demand: Demand, pattern: Pattern) -> int:
    return blocks_needed(
        demand, num_offloaded=pattern.num_offloaded, num_buffers=pattern.num_buffers
    )


def placed_pattern(placed: Holder | Placement | PrefixPlacement, engine: EngineShape) -> Pattern:
    """Return the pattern in force for a holder, or of an answer, in layer groups."""
    groups = sorted({layer // engine.layers_per_group for layer in placed.offloaded_layers})
    return make_pattern(tuple(groups), max(1, placed.num_prefetch_buffers))


def placed_by(
    plan: Plan, snapshot: Snapshot, requests: Sequence[RequestState]
) -> list[tuple[Holder, Pattern]]:
    """Return requests and the prefixes that they begin with where a plan for them has them.

    What it does not name stays where it is.
    """
    placed: dict[str, Placement | PrefixPlacement] = {p.request_id: p for p in plan.placements}
    placed |= {p.prefix_id: p for p in plan.prefixes}
    return [
        (one, placed_pattern(placed.get(one.holder_id, one), snapshot.engine))
        for one in holders_of(snapshot, requests)
    ]


def answer(
    snapshot: Snapshot,
    status: PlanStatus,
    patterns: Mapping[str, Pattern],
    paused: Iterable[RequestId],
) -> Plan:
    """Return a plan with one placement per request and prefix of the snapshot.

    `patterns`: by holder. Requests in neither argument hold no KV, or nothing is decided about
    them: left as they are, as a prefix is that none of those that run begins with.
    """
    held, engine = set(paused), snapshot.engine
    return Plan(
        epoch=snapshot.epoch,
        policy=snapshot.policy,
        status=status,
        placements=tuple(
            Placement(
                request_id=one.request_id,
                **_where(one, patterns, engine),
                paused=one.request_id not in patterns
                and (one.request_id in held or _stays_paused(one)),
            )
            for one in snapshot.requests
        ),
        prefixes=tuple(
            PrefixPlacement(prefix_id=one.prefix_id, **_where(one, patterns, engine))
            for one in snapshot.prefixes
        ),
    )


def _where(one: Holder, patterns: Mapping[str, Pattern], engine: EngineShape) -> dict[str, Any]:
    pattern = patterns.get(one.holder_id)
    if pattern is None:
        layers, num_buffers = one.offloaded_layers, one.num_prefetch_buffers
    else:
        layers = tuple(layer for group in pattern.offloaded for layer in engine.layers_of(group))
        num_buffers = pattern.num_buffers
    return {"offloaded_layers": layers, "num_prefetch_buffers": num_buffers}


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
    decodes = [one.context_at(step) for one in progress if one.decodes_at(step)]
    chunks_s = sum(
        chunk_layer_s(engine, profile, chunk=chunk, num_read=one.context_at(step))
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
    """Return how long the link needs for one offloaded group of a holder (tau_r)."""
    return link.copy_s(demand.num_full_blocks * engine.block_bytes)


def predicted_step_s(
    snapshot: Snapshot, batch: Sequence[tuple[Holder, Pattern]], *, growth: int = 0
) -> float:
    """Return the predicted length of a step of `batch`, `growth` steps from now.

    `batch`: requests, and the prefixes that they begin with; what is offloaded of one is loaded
    once for all of its users. Prompts under computation advance by their chunks. The snapshot has
    a profile and a host-to-GPU link.
    """
    assert snapshot.profile is not None
    assert snapshot.h2d is not None
    engine, link = snapshot.engine, snapshot.h2d
    progress = progress_of([one for one, _ in batch], engine)
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
