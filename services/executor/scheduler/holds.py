"""Which requests are held back from running, since when, and what becomes of their blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from services.control.counters import Counters

NEVER = 1 << 60  # a step that does not come
IDLE_WAIT_S = 0.005  # between steps of a batch in which nobody may run


class HoldKind(Enum):
    PAUSE = "pause"  # keeps its place and its blocks, which others may reclaim
    # Gives its blocks up as soon as their copies are complete, and waits in the queue.
    PARK = "park"
    LEAVE = "leave"  # the same at once: what is not copied yet is computed again


@dataclass(frozen=True, slots=True)
class Hold:
    kind: HoldKind
    since_s: float  # of the injected clock


class Holds:
    """Holds by request id. A hold ends by itself after `max_hold_s`: its author may have died."""

    def __init__(
        self, counters: Counters, *, clock: Callable[[], float], max_hold_s: float
    ) -> None:
        self.counters = counters
        self._clock = clock
        self._max_hold_s = max_hold_s
        self._holds: dict[str, Hold] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._holds

    def __len__(self) -> int:
        return len(self._holds)

    @property
    def known(self) -> frozenset[str]:
        return frozenset(self._holds)

    def kind(self, request_id: str) -> HoldKind | None:
        hold = self._holds.get(request_id)
        return None if hold is None else hold.kind

    def ids(self, kind: HoldKind) -> frozenset[str]:
        return frozenset(name for name, hold in self._holds.items() if hold.kind is kind)

    def count(self) -> dict[str, int]:
        """Return how many requests are held, by the names of metrics."""
        return {
            "num_paused_requests": len(self.ids(HoldKind.PAUSE)),
            "num_parked_requests": len(self.ids(HoldKind.PARK)),
        }

    def pause(self, request_id: str) -> None:
        """Hold a request; one that is held already stays as it is."""
        if request_id not in self._holds:
            self._holds[request_id] = Hold(HoldKind.PAUSE, self._clock())
            self.counters.num_pauses += 1

    def park(self, request_id: str) -> None:
        """Hold a request and have its blocks given up; a paused one becomes parked."""
        self._give_up(request_id, HoldKind.PARK)

    def leave(self, request_id: str) -> None:
        """Have a request's blocks given up in the next step; the hold ends with that."""
        self._give_up(request_id, HoldKind.LEAVE)

    def _give_up(self, request_id: str, kind: HoldKind) -> None:
        hold = self._holds.get(request_id)
        if hold is None or hold.kind is HoldKind.PAUSE:
            since_s = self._clock() if hold is None else hold.since_s
            self._holds[request_id] = Hold(kind, since_s)
            self.counters.num_parks += 1

    def release(self, request_id: str) -> bool:
        """End a hold; False if there is none."""
        return self._holds.pop(request_id, None) is not None

    def release_overdue(self) -> list[str]:
        """End the holds that last too long, and return whose they were."""
        latest_s = self._clock() - self._max_hold_s
        overdue = [name for name, hold in self._holds.items() if hold.since_s <= latest_s]
        for request_id in overdue:
            del self._holds[request_id]
        self.counters.num_overdue_holds += len(overdue)
        return overdue
