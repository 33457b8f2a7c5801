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
    num_inflight: int  # requests of this gateway that it has not ended, >= 0


def choose_executor(
    candidates: Sequence[Candidate], model: str, *, excluded: Collection[str] = ()
) -> Candidate:
    """Return the least loaded executor of `model` whose address is not in `excluded`.

    The earlier of two equals wins. Raises UnknownModelError if executors are connected and none
    serves the model, UnavailableError if none is connected or all that serve it are excluded.
    """
    if not candidates:
        raise UnavailableError("no executor is connected")
    serving = [candidate for candidate in candidates if candidate.model == model]
    if not serving:
        raise UnknownModelError(model)
    eligible = [candidate for candidate in serving if candidate.address not in excluded]
    if not eligible:
        raise UnavailableError(f'no executor of the model "{model}" can take the request')
    return min(eligible, key=lambda candidate: candidate.num_inflight)
