"""Whether the parts of a snapshot fit each other."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from services.placement.types import EngineShape, RequestState, Snapshot


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
    engine = snapshot.engine
    if engine.layers_per_group > engine.num_layers:
        yield Contradiction(field="engine.layers_per_group", message="exceeds num_layers")
    if snapshot.num_free_blocks > engine.num_blocks:
        yield Contradiction(field="num_free_blocks", message="exceeds engine.num_blocks")
    seen = set()
    for index, request in enumerate(snapshot.requests):
        if request.request_id in seen:
            yield Contradiction(field=f"requests[{index}].request_id", message="is not unique")
        seen.add(request.request_id)
        for name, message in _request_contradictions(request, engine):
            yield Contradiction(field=f"requests[{index}].{name}", message=message)


def _request_contradictions(
    request: RequestState, engine: EngineShape
) -> Iterator[tuple[str, str]]:
    if request.num_computed_tokens > request.num_prompt_tokens + request.num_output_tokens:
        yield "num_computed_tokens", "exceeds prompt + output tokens"
    if request.num_deposited_tokens > request.num_output_tokens:
        yield "num_deposited_tokens", "exceeds num_output_tokens"
    if request.first_token_age_s is not None and request.first_token_age_s > request.arrival_age_s:
        yield "first_token_age_s", "is before arrival"
    layers = request.offloaded_layers
    if any(later <= earlier for earlier, later in pairwise(layers)):
        yield "offloaded_layers", "is not ascending"
    if layers and layers[-1] >= engine.num_layers:
        yield "offloaded_layers", "names a layer that the engine does not have"
