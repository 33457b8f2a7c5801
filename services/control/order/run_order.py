"""The order of the queue: the engine's own, or the run policy's while its decision is in force."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic

from services.control.engine import Engine, RequestT
from services.control.kv import KVT, is_whole
from services.control.prefixes.prefix_cache import Column
from services.control.requests.life import State
from services.control.requests.request_record import RequestRecord
from services.control.room.capacity_guard import Need
from services.placement.run.types import RunDecision
from services.placement.types import RequestId


class RunOrder(Generic[RequestT, KVT]):
    """Which requests of an engine's queue may be admitted, and in which order."""

    def __init__(self, engine: Engine[RequestT, KVT]) -> None:
        self.decision: RunDecision | None = None  # in force; None: every request may run
        self.engine = engine
        self._ranks: dict[RequestId, int] = {}  # of the requests that the decision lets run

    def obey(self, decision: RunDecision | None) -> None:
        """Let a decision hold from the next step on; None: the queue is the engine's own."""
        self.decision = decision
        if decision is None:
            return
        self._ranks = {name: number for number, name in enumerate(decision.run)}
        for name, record in self.engine.records.items():
            if record.state is not State.LEAVING or name not in self._ranks:
                continue
            # It had tokens in flight, and has not left yet. If it has given layers up meanwhile it
            # leaves, and comes back as a whole: with layers on the host it would slow each step.
            if decision.offloads or is_whole(record.kv):
                record.enter(State.PAUSED)

    def requests(self) -> Iterable[RequestT]:
        """Return the requests that may be admitted, in order."""
        if self.decision is None:
            return self.engine.waiting
        ranks = self._ranks
        named = [request for request in self.engine.waiting if request.request_id in ranks]
        return sorted(named, key=lambda request: ranks[RequestId(request.request_id)])

    def eligible(self) -> Iterator[RequestT]:
        """Yield those of them that nothing holds."""
        return (request for request in self.requests() if not self.record_of(request).is_held)

    def record_of(self, request: RequestT) -> RequestRecord[KVT]:
        return self.engine.records[request.request_id]

    def active_needs(self) -> list[Need[KVT]]:
        """Return what the running requests that are not held need, in scheduling order."""
        running = self.engine.running
        return [self.engine.need_of(one) for one in running if not self.record_of(one).is_held]

    def cached_prefix(self, request: RequestT) -> Sequence[Column]:
        """Return the columns that a request may begin with; none where it has begun."""
        record = self.record_of(request)
        if record.kv is not None or record.way is not None:
            return ()
        return self.engine.cached_prefix(request)
