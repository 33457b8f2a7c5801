"""An engine in memory, as the controller sees one."""

from collections.abc import Mapping, Sequence

from lab.snapshots import make_engine, make_request, make_snapshot
from services.control.link_rate import LinkRate
from services.control.planner import Answer
from services.control.prediction import PlacedRequest
from services.control.types import Links
from services.placement.blocks import RESIDENT
from services.placement.plan_rules import LiveRequest
from services.placement.types import (
    EngineShape,
    Link,
    Placement,
    PolicyParameters,
    Profile,
    RequestId,
    Snapshot,
)

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
    """Requests by name; records where each was placed and who is paused."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.placed: dict[str, tuple[int, ...]] = {}
        self.paused: set[str] = set()

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

    def live_requests(self) -> list[LiveRequest]:
        return [
            LiveRequest(
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

    def priority(self, request_id: str) -> int:
        return 0

    def place(self, request_id: str, *, groups: Sequence[int], num_buffers: int) -> None:
        self.placed[request_id] = tuple(groups)

    def release(self, request_id: str) -> None:
        self.placed.pop(request_id, None)

    def set_deposits(self, num_tokens: Mapping[RequestId, int]) -> None:
        self.deposits = dict(num_tokens)

    def is_paused(self, request_id: str) -> bool:
        return request_id in self.paused

    def pause(self, request_id: str) -> bool:
        self.paused.add(request_id)
        return True

    def resume(self, request_id: str) -> None:
        self.paused.discard(request_id)


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
