"""Whether the parts of a snapshot fit each other."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from services.placement.types import (
    EngineShape,
    Holder,
    PrefixState,
    RequestPhase,
    RequestState,
    Snapshot,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    field: str  # path from the snapshot, as in the .proto: "requests[2].offloaded_layers"
    message: str  # what is wrong with it


def find_contradiction(snapshot: Snapshot) -> Contradiction | None:
    """Return the first field that contradicts another one, None for a sound snapshot.

    Ranges of single fields are not looked at: they are checked where a snapshot enters.
    """
    return next(_contradictions(snapshot), None)


def _contradictions(snapshot: Snapshot) -> Iterator[Contradiction]:
    for name, message in _engine_contradictions(snapshot):
        yield Contradiction(field=name, message=message)
    seen, prefixes = set[str](), {prefix.prefix_id for prefix in snapshot.prefixes}
    for index, request in enumerate(snapshot.requests):
        if request.request_id in seen:
            yield Contradiction(field=f"requests[{index}].request_id", message="is not unique")
        seen.add(request.request_id)
        for name, message in _request_contradictions(request, snapshot.engine):
            yield Contradiction(field=f"requests[{index}].{name}", message=message)
        named = set(request.prefix_ids)
        if len(named) < len(request.prefix_ids) or not named <= prefixes:
            message = "names a prefix twice, or one that is not in prefixes"
            yield Contradiction(field=f"requests[{index}].prefix_ids", message=message)
    for index, prefix in enumerate(snapshot.prefixes):
        if prefix.prefix_id in seen:
            yield Contradiction(field=f"prefixes[{index}].prefix_id", message="is not unique")
        seen.add(prefix.prefix_id)
        for name, message in _prefix_contradictions(prefix, snapshot.engine):
            yield Contradiction(field=f"prefixes[{index}].{name}", message=message)


def _engine_contradictions(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    engine, parameters = snapshot.engine, snapshot.parameters
    if engine.layers_per_group > engine.num_layers:
        yield "engine.layers_per_group", "exceeds num_layers"
    holders: list[Holder] = [*snapshot.requests, *snapshot.prefixes]
    held = sum(sum(one.num_blocks) for one in holders)
    if snapshot.num_free_blocks + held > engine.num_blocks:
        yield "num_free_blocks", "exceeds engine.num_blocks less the blocks that are held"
    if parameters.max_window < parameters.min_window:
        yield "parameters.max_window", "is below min_window"
    if parameters.max_pause_s < parameters.min_pause_s:
        yield "parameters.max_pause_s", "is below min_pause_s"


def _request_contradictions(
    request: RequestState, engine: EngineShape
) -> Iterator[tuple[str, str]]:
    if request.num_computed_tokens > request.num_prompt_tokens + request.num_output_tokens:
        yield "num_computed_tokens", "exceeds prompt + output tokens"
    if request.num_deposited_tokens > request.num_output_tokens:
        yield "num_deposited_tokens", "exceeds num_output_tokens"
    if (request.paused_age_s is not None) != (request.phase is RequestPhase.PAUSED):
        yield "paused_age_s", "is set if and only if the phase is PAUSED"
    low, high = request.predicted_min_output_tokens, request.predicted_max_output_tokens
    if (low is None) != (high is None):
        yield "predicted_max_output_tokens", "is set if and only if the minimum is"
    if low is not None and high is not None and low > high:
        yield "predicted_max_output_tokens", "is below the minimum"
    yield from _layer_contradictions(request, engine)


def _prefix_contradictions(prefix: PrefixState, engine: EngineShape) -> Iterator[tuple[str, str]]:
    if prefix.num_tokens % engine.block_size:
        yield "num_tokens", "is not a multiple of engine.block_size"
    yield from _layer_contradictions(prefix, engine)


def _layer_contradictions(holder: Holder, engine: EngineShape) -> Iterator[tuple[str, str]]:
    layers = holder.offloaded_layers
    if any(later <= earlier for earlier, later in pairwise(layers)):
        yield "offloaded_layers", "is not ascending"
    if layers and layers[-1] >= engine.num_layers:
        yield "offloaded_layers", "names a layer that the engine does not have"
    groups = {layer // engine.layers_per_group for layer in layers}
    if sum(len(engine.layers_of(group)) for group in groups) != len(layers):
        yield "offloaded_layers", "splits a layer group"
    if holder.num_prefetch_buffers > len(groups):
        yield "num_prefetch_buffers", "exceeds the number of offloaded layer groups"
    if groups and not holder.num_prefetch_buffers:
        yield "num_prefetch_buffers", "is 0 although layers are offloaded"
    for name, blocks in (
        ("num_blocks", holder.num_blocks),
        ("num_host_blocks", holder.num_host_blocks),
    ):
        if len(blocks) not in (0, engine.num_groups):
            yield name, "has not one entry per layer group"
    if max(holder.num_host_blocks, default=0) * engine.block_size > holder.num_computed_tokens:
        yield "num_host_blocks", "exceeds the full blocks of the tokens whose KV exists"
