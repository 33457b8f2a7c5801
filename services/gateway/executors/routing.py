"""Which executor takes a request. No I/O."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.gateway.errors import UnknownModelError
from services.kit.errors import UnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A connected executor at this moment."""

    address: str
    model: str
    max_model_len: int  # prompt and output tokens of one request at most
    num_inflight: int  # requests of this gateway that it has not ended, >= 0


def choose_executor(
    candidates: Sequence[Candidate], model: str, *, excluded: Collection[str] = (), turn: int = 0
) -> Candidate:
    """Return the least loaded executor of `model` whose address is not in `excluded`.

    Equals come by turns, counted by the caller from 0. Raises UnknownModelError if executors are
    connected and none serves the model, UnavailableError if none is connected or all that serve it
    are excluded.
    """
    if not candidates:
        raise UnavailableError("no executor is connected")
    serving = [candidate for candidate in candidates if candidate.model == model]
    if not serving:
        raise UnknownModelError(model)
    eligible = [candidate for candidate in serving if candidate.address not in excluded]
    if not eligible:
        raise UnavailableError(f'no executor of the model "{model}" can take the request')
    least = min(candidate.num_inflight for candidate in eligible)
    equals = [candidate for candidate in eligible if candidate.num_inflight == least]
    return equals[turn % len(equals)]
