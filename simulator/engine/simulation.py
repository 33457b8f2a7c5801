"""Runs an engine on a workload until every request has left."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count

from services.placement.types import RequestId
from simulator.engine.engine import Engine
from simulator.engine.events import Arrived, Event
from simulator.engine.records import RunRecord
from simulator.workload import ArrivingRequest


def simulate(
    engine: Engine,
    requests: Iterable[ArrivingRequest],
    *,
    after_event: Callable[[Event], None] = lambda event: None,
) -> RunRecord:
    """Return what happens. Events of the same instant are handled in the order they were made.

    A request comes behind all that it follows in `requests`.
    """
    numbers, followers = count(), Followers()
    events: list[tuple[float, int, Event]] = []
    for request in requests:
        if not followers.wait(request):
            arrived = Arrived(time_s=request.arrival_s, request=request)
            events.append((request.arrival_s, next(numbers), arrived))
    heapq.heapify(events)
    num_events, num_ended, now_s = 0, 0, 0.0
    while events:
        now_s, _, event = heapq.heappop(events)
        following = engine.handle(event)
        for outcome in engine.outcomes[num_ended:]:
            following += followers.ended(outcome.request_id, now_s)
        num_ended = len(engine.outcomes)
        for one in following:
            heapq.heappush(events, (one.time_s, next(numbers), one))
        num_events += 1
        after_event(event)
    engine.close()
    followers.check_none()
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    return RunRecord(
        outcomes=tuple(engine.outcomes),
        totals=engine.totals,
        num_events=num_events,
        end_s=now_s,
        samples=engine.residency.samples,
    )


class Followers:
    """Requests that arrive once others have ended."""

    def __init__(self) -> None:
        self._num_awaited: dict[RequestId, int] = {}
        self._behind: defaultdict[RequestId, list[ArrivingRequest]] = defaultdict(list)

    def wait(self, request: ArrivingRequest) -> bool:
        """Take in a request that follows others; False, and nothing is, for one that does not."""
        for other in request.follows:
            self._behind[other].append(request)
        if request.follows:
            self._num_awaited[request.request_id] = len(request.follows)
        return bool(request.follows)

    def ended(self, request_id: RequestId, now_s: float) -> Iterator[Arrived]:
        """Yield the arrivals of requests that followed this one and no other that goes on."""
        for request in self._behind.pop(request_id, ()):
            self._num_awaited[request.request_id] -= 1
            if not self._num_awaited[request.request_id]:
                del self._num_awaited[request.request_id]
                arrival_s = max(request.arrival_s, now_s + request.wait_s)
                yield Arrived(time_s=arrival_s, request=replace(request, arrival_s=arrival_s))

    def check_none(self) -> None:
        """Raise ValueError if requests are left: they follow what there is not."""
        if self._num_awaited:
            left = ", ".join(sorted(self._num_awaited))
            raise ValueError(f"these follow requests that there are not: {left}")
