"""An engine in memory, as the controller sees one."""

from typing import Any

from lab.planning.snapshots import make_engine, make_request, make_snapshot
from services.control.measures.link_rate import LinkRate
from services.control.measures.prediction import PlacedRequest
from services.control.plans.planner import Answer
from services.control.requests.life import State
from services.control.requests.request_record import RequestRecord
from services.control.types import Links
from services.placement.blocks import RESIDENT
from services.placement.judging.plan_rules import LivePlace
from services.placement.types import (
    EngineShape,
    Link,
    Placement,
    PolicyParameters,
    Profile,
    RequestId,
    Snapshot,
)
from tests.unit.records import make_record

LINK = Link(bytes_per_s=1e9)


def place(name: str, *layers: int, paused: bool = False) -> Placement:
    """Return where a request's layers are, with one buffer if any is on the host."""
    return Placement(
        request_id=RequestId(name),
        offloaded_layers=layers,
        num_prefetch_buffers=1 if layers else 0,
        paused=paused,
    )


class FakeEngine:
    """Requests by name: where each was placed, and which are paused."""

    def __init__(self, *names: str) -> None:
        self.records = {name: make_record(name, arrival_s=1_000.0) for name in names}
        for record in self.records.values():
            record.enter(State.RUNNING)

    @property
    def names(self) -> list[str]:
        return list(self.records)

    @property
    def placed(self) -> dict[str, tuple[int, ...]]:
        floors = {name: record.floor for name, record in self.records.items()}
        return {name: tuple(sorted(floor.offloaded)) for name, floor in floors.items() if floor}

    @property
    def paused(self) -> set[str]:
        return {name for name, record in self.records.items() if record.is_held}

    @property
    def shape(self) -> EngineShape:
        return make_engine()

    def snapshot(self, *, epoch: int, profile: Profile, links: Links) -> Snapshot:
        requests = [make_request(name) for name in self.names]
        return make_snapshot(*requests, epoch=epoch, profile=profile, h2d=links.h2d)

    def links(self, h2d: LinkRate, d2h: LinkRate) -> Links:
        return Links(h2d=LINK, d2h=LINK)

    def placed_requests(self) -> list[PlacedRequest]:
        return [PlacedRequest(num_tokens=1_600) for _ in self.names]

    def live_requests(self) -> list[LivePlace]:
        return [
            LivePlace(
                request_id=RequestId(name),
                num_tokens=1_600,
                residency=RESIDENT,
                holds_kv=True,
                paused=name in self.paused,
            )
            for name in self.names
        ]

    def num_runnable(self) -> int:
        return len(set(self.names) - self.paused)

    def priority(self, record: RequestRecord[Any]) -> int:
        return 0


class FakePlanner:
    """Keeps what it was asked, and hands out what a test puts in."""

    def __init__(self) -> None:
        self.asked: list[Snapshot] = []
        self.answers: list[Answer] = []
        self.closed = False

    def post(self, snapshot: Snapshot) -> bool:
        self.asked.append(snapshot)
        return False

    def take(self) -> Answer | None:
        return self.answers.pop(0) if self.answers else None

    def close(self) -> None:
        self.closed = True


PARAMETERS = PolicyParameters(min_pause_s=1.0, max_pause_s=10.0)
