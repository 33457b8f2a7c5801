"""An engine in memory, as the step loop sees one."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from lab.planning.snapshots import BLOCK_SIZE, make_engine
from services.control.kv import KVView
from services.control.measures.link_rate import LinkRate
from services.control.measures.rates import Rates
from services.control.order.line import Line
from services.control.plans.planner import PlanAnswer
from services.control.prefixes.anchors import ComingTurn
from services.control.requests.life import State
from services.control.requests.request_record import RequestRecord
from services.control.room.capacity_guard import Need
from services.control.types import Links
from services.placement.types import (
    EngineShape,
    Link,
    Placement,
    PolicyParameters,
    RequestId,
    Snapshot,
)
from tests.unit.records import make_record

LINK = Link(bytes_per_s=1e9)
NUM_TOKENS = 1_600
BEGUN = {State.RUNNING, State.PAUSED, State.LEAVING}


def place(name: str, *layers: int, paused: bool = False) -> Placement:
    """Return where a request's layers are, with one buffer if any is on the host."""
    return Placement(
        request_id=RequestId(name),
        offloaded_layers=layers,
        num_prefetch_buffers=1 if layers else 0,
        paused=paused,
    )


class FakeTrunk(SimpleNamespace):
    """A trunk as the loop sees one: equal to itself only."""

    __eq__, __hash__ = object.__eq__, object.__hash__


class FakeEngine:
    """`Engine` over requests by name: where each was placed, and which are paused."""

    num_places = 8
    num_free_blocks = 10_000
    num_write_through_blocks = 0
    num_step_loads = 0  # blocks

    def __init__(self, *names: str) -> None:
        self.records: dict[str, RequestRecord[Any]] = {}
        self.requests: dict[str, Any] = {}
        self.looked_up: list[str] = []  # in the prefix cache, in this order
        self.parked: list[str] = []
        self.coming_turns: dict[str, ComingTurn] = {}
        for name in names:
            self.add(name).enter(State.RUNNING)

    def add(self, name: str, **record: Any) -> RequestRecord[Any]:
        """Let a request arrive, with its KV in the pool once it runs."""
        made = self.records[name] = make_record(name, **{"arrival_s": 1_000.0} | record)
        made.kv = SimpleNamespace(
            num_tokens=NUM_TOKENS,
            num_own_tokens=NUM_TOKENS,
            trunks=(),
            num_shared=0,
            offloaded=(),
            num_buffers=0,
            mirrored=True,
            num_host_blocks=2,
            num_side_tokens=0,
            view=KVView(),
        )
        self.requests[name] = SimpleNamespace(
            request_id=name,
            arrival_time=float(len(self.requests)),
            num_prompt_tokens=NUM_TOKENS - 64,
            num_output_tokens=64,
            num_tokens=NUM_TOKENS,
            num_computed_tokens=NUM_TOKENS,
            max_tokens=128,
            num_preemptions=0,
        )
        return made

    def share(self, trunk: str, *names: str) -> Any:
        """Let requests begin with two blocks that they share, behind those that they share now."""
        kvs = [self.records[name].kv for name in names]
        num_shared = kvs[0].num_shared
        made = FakeTrunk(
            request_id=trunk,
            floor=None,
            num_tokens=(num_shared + 2) * BLOCK_SIZE,
            num_own_tokens=2 * BLOCK_SIZE,
            num_shared=num_shared,
            offloaded=(),
            num_buffers=0,
            view=KVView(num_blocks=(2,) * 8, num_host_blocks=(num_shared + 2,) * 8),
        )
        for kv in kvs:
            kv.trunks, kv.num_shared = (*kv.trunks, made), num_shared + 2
            kv.num_own_tokens -= 2 * BLOCK_SIZE
        return made

    def line(self) -> Line[Any, Any]:
        """Return its line; no request of it comes back."""
        resumes: Any = SimpleNamespace(allow=lambda ways: None)
        return Line(self, resumes, Rates)

    def _those(self, *, begun: bool) -> list[Any]:
        return [
            self.requests[name]
            for name, record in self.records.items()
            if (record.state in BEGUN) is begun
        ]

    @property
    def running(self) -> list[Any]:
        return self._those(begun=True)

    @property
    def waiting(self) -> list[Any]:
        return self._those(begun=False)

    @property
    def live(self) -> list[Any]:
        return [*self.running, *self.waiting]

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

    def need_of(self, request: Any) -> Need[Any]:
        return Need(self.records[request.request_id], request.num_tokens)

    def park(self, record: RequestRecord[Any]) -> None:
        self.parked.append(record.request_id)

    def links(self, h2d: LinkRate, d2h: LinkRate) -> Links:
        return Links(h2d=LINK, d2h=LINK)

    def num_returning_bytes(self) -> int:
        return 7

    def num_step_load_blocks(self, needs: Sequence[Need[Any]]) -> int:
        return self.num_step_loads

    def num_predicted_slots(self, request: Any) -> int:
        return 0

    def cached_prefix(self, request: Any) -> Sequence[Any]:
        self.looked_up.append(request.request_id)
        return ()

    def stretches(self, request: Any) -> Sequence[Any]:
        return ()

    def coming_prefix(self, request: Any) -> None:
        """Nobody computes what another begins with."""

    def coming_turn(self, request: Any) -> ComingTurn | None:
        return self.coming_turns.get(request.request_id)

    def num_to_share(self, request: Any) -> int:
        return 0

    def adopt_prefix(self, request: Any, columns: Sequence[Any]) -> None:
        """Nothing is cached."""


class FakePlanner:
    """Keeps what it was asked, and hands out what a test puts in."""

    def __init__(self) -> None:
        self.asked: list[Snapshot] = []
        self.answers: list[PlanAnswer] = []
        self.closed = False

    def post(self, snapshot: Snapshot) -> bool:
        self.asked.append(snapshot)
        return False

    def take(self) -> PlanAnswer | None:
        return self.answers.pop(0) if self.answers else None

    def close(self) -> None:
        self.closed = True


PARAMETERS = PolicyParameters(min_pause_s=1.0, max_pause_s=10.0)
