"""Keeps requests from running: since when, and what becomes of their blocks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from services.control.counters import Counters
from services.control.requests.request_record import Hold, HoldKind, RequestRecord


class Holds:
    """Sets and ends the holds of requests. One ends by itself after `max_hold_s`.

    Its author may have died.
    """

    def __init__(
        self,
        records: Mapping[str, RequestRecord[Any]],
        counters: Counters,
        *,
        clock: Callable[[], float],
        max_hold_s: float,
    ) -> None:
        """`records`: of all live requests."""
        self._records = records
        self._counters = counters
        self._clock = clock
        self._max_hold_s = max_hold_s

    def ids(self, *kinds: HoldKind) -> frozenset[str]:
        held = self._held()
        return frozenset(one.request_id for one in held if one.hold and one.hold.kind in kinds)

    def count(self) -> dict[str, int]:
        """Return how many requests are held, by the names of metrics."""
        return {
            "num_paused_requests": len(self.ids(HoldKind.PAUSE)),
            "num_parked_requests": len(self.ids(HoldKind.PARK)),
        }

    def pause(self, record: RequestRecord[Any]) -> None:
        """Hold a request; one that is held already stays as it is."""
        if record.hold is None:
            record.hold = Hold(HoldKind.PAUSE, self._clock())
            self._counters.num_pauses += 1

    def park(self, record: RequestRecord[Any]) -> None:
        """Hold a request and have its blocks given up; a paused one becomes parked."""
        self._give_up(record, HoldKind.PARK)

    def leave(self, record: RequestRecord[Any]) -> None:
        """Have a request's blocks given up in the next step; the hold ends with that."""
        self._give_up(record, HoldKind.LEAVE)

    def _give_up(self, record: RequestRecord[Any], kind: HoldKind) -> None:
        hold = record.hold
        if hold is None or hold.kind is HoldKind.PAUSE:
            since_s = self._clock() if hold is None else hold.since_s
            record.hold = Hold(kind, since_s)
            self._counters.num_parks += 1

    def release_overdue(self) -> None:
        """End the holds that last too long."""
        latest_s = self._clock() - self._max_hold_s
        for record in self._held():
            if record.hold is not None and record.hold.since_s <= latest_s:
                record.hold = None
                self._counters.num_overdue_holds += 1

    def _held(self) -> Iterable[RequestRecord[Any]]:
        return [record for record in self._records.values() if record.hold is not None]
