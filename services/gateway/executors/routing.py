"""Which executor takes a request, and which number that routing has. No I/O."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.gateway.errors import UnknownModelError
from services.gateway.types import RequestId
from services.kit.clock import Clock
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


FIRST_GENERATION_AT_S = 1_577_836_800  # 2020-01-01: seconds since then fit 31 bits until 2088
MAX_REMEMBERED_IDS = 10_000


class RoutingGenerations:
    """Numbers the routings of each request id upwards, also across restarts and gateways.

    The number is the wall clock's second, or one more than the id's last: an id that is used
    again never merges with what the tracker still has of its earlier life.
    """

    def __init__(self, wall_clock: Clock) -> None:
        self._wall_clock = wall_clock
        self._last: dict[RequestId, int] = {}  # of recent ids, for those used twice in a second

    def next(self, request_id: RequestId) -> int:
        """Return a number > 0, greater than any returned for `request_id` before."""
        now = int(self._wall_clock()) - FIRST_GENERATION_AT_S
        number = max(now, self._last.pop(request_id, 0) + 1)
        self._last[request_id] = number
        if len(self._last) > MAX_REMEMBERED_IDS:
            del self._last[next(iter(self._last))]
        return number
