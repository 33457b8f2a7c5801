"""Where a live request is, and what gateway, executor and tracker say to each other of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.gateway import convert, metrics
from services.gateway.executors.link import Asked, ExecutorLink
from services.gateway.executors.routing import Candidate
from services.gateway.live.generation import Generation
from services.gateway.live.losses import Losses
from services.gateway.live.reports import DeliveryReports
from services.gateway.live.request_trace import RequestTrace
from services.gateway.types import RequestId
from services.kit.errors import ServiceError, UnavailableError
from services.reporting.ledger import RequestRef


class Keeper(Protocol):
    """Hears what becomes of requests at the executors that they were routed to."""

    def taken(self, route: "Route") -> None:
        """Take in that the executor has taken the request."""

    def lost(self, route: "Route", error: ServiceError) -> ServiceError | None:
        """As `Holder.lost`."""


@dataclass(slots=True, eq=False)
class Route:
    """One routing of a request: the holder of its generation."""

    link: ExecutorLink
    ref: RequestRef
    reports: DeliveryReports
    keeper: Keeper
    is_taken: bool = False  # the executor has, or had, the request

    def taken(self) -> None:
        self.keeper.taken(self)

    def lost(self, error: ServiceError) -> ServiceError | None:
        return self.keeper.lost(self, error)

    def progressed(self, num_delivered: int) -> None:
        """Tell executor and tracker how far the reader has come."""
        self.link.delivered(self.ref.request_id, num_delivered)
        self.reports.update(self.ref, num_delivered=num_delivered)

    def lags(self, hold: bool) -> None:
        """Have the executor hold the request, for its reader lags, or go on with it."""
        if self.link.hold(self.ref.request_id, hold) and hold:
            metrics.HOLDS.inc()

    def end(self) -> None:
        """Have the tracker know that the executor has nothing more to do with the request."""
        if self.is_taken:
            self.reports.update(self.ref, final=True)

    def leave(self) -> None:
        """Have executor and tracker know that no more of the request is wanted."""
        self.link.abandon(self.ref.request_id)
        self.end()


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """All that the gateway has of one request, from its admission to its end."""

    generation: Generation
    names: tuple[RequestId | None, ...]  # what its client may call it; others' may be the same
    trace: RequestTrace
    num_submits: int = 0  # also the number of its last routing
    route: Route | None = None  # the newest; its executor need not have taken the request yet
    asked: Candidate | None = None  # the executor of the newest route
    home: Candidate | None = None  # the executor that took it last; None: none has
    started_s: float = 0.0  # when it did
    num_at_start: int = 0  # tokens that there were then
    num_at_loss: int = 0  # most tokens that there were when an executor was lost
    losses: Losses = field(default_factory=Losses)  # losses of executors that it was new at
    is_called_off: bool = False  # it was aborted where it is, to go on elsewhere


class Routes:
    """The links to all executors, by their addresses; they come and go."""

    def __init__(self, links: Mapping[str, ExecutorLink], reports: DeliveryReports) -> None:
        self.links = links
        self._reports = reports

    def candidates(self) -> list[Candidate]:
        """Return the executors that take requests now."""
        return [found for link in self.links.values() if (found := link.candidate())]

    def submit(self, address: str, answers: Sequence[LiveRequest], keeper: Keeper) -> None:
        """Hand answers to one prompt to an executor; a lone one goes on with the tokens that it
        has. `keeper` hears the rest. Raises as `ExecutorLink.submit`, and nothing has changed then.
        """
        link = self.links[address]
        info, candidate = link.info, link.candidate()
        if info is None or candidate is None:
            raise UnavailableError("the executor is not connected")
        number = answers[0].num_submits + 1
        asked = [
            Asked(
                one.generation.request, one.generation, one.trace.context, one.generation.resume()
            )
            for one in answers
        ]
        link.submit(asked, number)
        for live in answers:
            ref = RequestRef(info.executor_id, live.generation.request.request_id, number)
            live.num_submits, live.asked = number, candidate
            live.route = Route(link, ref, self._reports, keeper)
            live.generation.held_by(live.route)

    def register(self, route: Route, generation: Generation) -> None:
        """Have the tracker know where a request is."""
        self._reports.register(
            convert.registration_to_proto(
                generation.request,
                executor_id=route.ref.executor_id,
                generation=route.ref.generation,
                num_prompt_tokens=generation.num_prompt_tokens,
            )
        )
