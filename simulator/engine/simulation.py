"""Runs an engine on a workload until every request has left."""

import heapq
from collections.abc import Callable, Iterable
from itertools import count

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
    """Return what happens. Events of the same instant are handled in the order they were made."""
    numbers = count()
    queue = [(r.arrival_s, next(numbers), Arrived(time_s=r.arrival_s, request=r)) for r in requests]
    events: list[tuple[float, int, Event]] = [*queue]
    heapq.heapify(events)
    num_events, now_s = 0, 0.0
    while events:
        now_s, _, event = heapq.heappop(events)
        for following in engine.handle(event):
            heapq.heappush(events, (following.time_s, next(numbers), following))
        num_events += 1
        after_event(event)
    engine.close()
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    return RunRecord(
        outcomes=tuple(engine.outcomes),
        totals=engine.totals,
        num_events=num_events,
        end_s=now_s,
        samples=engine.residency.samples,
    )
