"""What the controller needs of the scheduler."""

from dataclasses import dataclass
from typing import Any, Protocol

from services.control.measures.link_rate import LinkRate
from services.control.measures.prediction import PlacedRequest
from services.control.requests.request_record import RequestRecord
from services.control.types import Links
from services.placement.judging.plan_rules import LivePlace
from services.placement.types import EngineShape, Profile, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledStep:
    """One step as it leaves the scheduler."""

    number: int = 0  # as ranks count steps, from 1; 0: they do not
    scheduled_s: float
    num_tokens: int
    num_context_tokens: int
    num_prefill_tokens: int
    num_prefill_pairs: int  # of a prompt's token and a token that it attends to
    same_batch: bool  # as the step before: requests and placements
    undisturbed: bool  # no copy but those that layers wait for


class EngineSeam(Protocol):
    """Called between steps, on the engine's thread."""

    @property
    def shape(self) -> EngineShape: ...

    def snapshot(self, *, epoch: int, profile: Profile, links: Links) -> Snapshot: ...

    def links(self, h2d: LinkRate, d2h: LinkRate) -> Links:
        """Return both directions at their measured rates, with what is queued now."""

    def placed_requests(self) -> list[PlacedRequest]:
        """Return the requests of the step that was scheduled last."""

    def live_requests(self) -> list[LivePlace]: ...

    def num_runnable(self) -> int:
        """Return how many requests the next step may serve: not paused, running or waiting."""

    def priority(self, record: RequestRecord[Any]) -> int: ...
