"""`python -m bench.planner.decisions [--policy NAME] [--profile]`: the batch, how long it takes.

The whole of `Admission.before_schedule`, as the engine's thread pays for it: what a policy sees,
its decision, and what becomes of it. In CPU time of the thread: the machine is shared.
"""

import argparse
import cProfile
import pstats
import random
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.planner.tables import Row, Table
from lab.planning.snapshots import BLOCK_SIZE, make_engine
from lab.policies.presets import full_name
from services.control.admission import Admission
from services.control.counters import Counters
from services.control.measures.rates import Rates
from services.control.order.line import Line
from services.control.prefixes.prefix_cache import Column, PrefixCache
from services.control.prefixes.shared_prefixes import Stretch
from services.control.requests.life import State
from services.control.requests.request_ledger import RequestLedger
from services.control.requests.request_record import RequestRecord
from services.control.room.capacity_guard import Need
from services.pacing.request_buffer import RequestBuffer
from services.pacing.types import ServiceLevel
from services.placement.presets import preset_of
from services.placement.run.types import StepCosts
from services.placement.types import EngineShape

NUM_LAYERS = 32
RATE_TPS = 20.0
COSTS = StepCosts(
    outside_s=0.002,
    base_s=0.025,
    token_s=1e-4,
    context_s=1e-8,
    chunk_base_s=0.002,
    chunk_token_s=5e-5,
)
COLUMNS = ("32 run and", "changed: ms p50 / p99", "its snapshot", "asked again: ms p50 / p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Requests of 200 to 2,000 tokens, on an engine of 32 layer groups."""

    name: str
    room: float  # the pool's size over what those that run hold
    num_waiting: int = 0
    num_parked: int = 0
    link_bytes_per_s: float = 1e10
    num_priorities: int = 1


CROWDS = (
    Crowd(name="nobody waits", room=1.5),
    Crowd(name="200 wait, all fit", room=20.0, num_waiting=200),
    Crowd(name="200 wait, full", room=1.01, num_waiting=200),
    Crowd(name="200 wait, 16 parked, full", room=1.01, num_waiting=200, num_parked=16),
    Crowd(
        name="200 wait, 16 parked, full, three priorities",
        room=1.01,
        num_waiting=200,
        num_parked=16,
        num_priorities=3,
    ),
    Crowd(name="200 wait, outgrown, fast link", room=0.95, num_waiting=200),
    Crowd(name="200 wait, outgrown, slow link", room=0.95, num_waiting=200, link_bytes_per_s=1e8),
)


@dataclass(slots=True, kw_only=True)
class Request:
    """A scheduler's request."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    arrival_time: float
    num_preemptions: int = 0
    max_tokens: int = 1_000

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_computed_tokens(self) -> int:
        return self.num_tokens if self.num_output_tokens else 0


class Crowded:
    """What `Admission` needs of an `Engine`, over a crowd that never moves.

    Half of a newcomer's prompt is cached.
    """

    def __init__(self, crowd: Crowd, seed: int) -> None:
        draw = random.Random(seed)
        self._num_priorities = crowd.num_priorities
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.records: dict[str, RequestRecord[Any]] = {}
        self.ledger = RequestLedger(self.records)
        self.cache = PrefixCache(Counters())
        self.keys: dict[str, list[Hashable]] = {}  # of newcomers' full blocks
        for number in range(32):
            self._run(self._add(f"running{number}", draw, begun=True))
        for number in range(crowd.num_parked):
            parked = self._add(f"parked{number}", draw, begun=True)
            parked.num_preemptions = 1
            self.waiting.append(parked)
        for number in range(crowd.num_waiting):
            self._wait(self._add(f"new{number}", draw, begun=False))
        rows = sum(-(-request.num_tokens // BLOCK_SIZE) for request in self.running)
        self.shape: EngineShape = make_engine(
            num_layers=NUM_LAYERS, num_blocks=int(crowd.room * rows * NUM_LAYERS), max_num_seqs=256
        )

    def _add(self, name: str, draw: random.Random, *, begun: bool) -> Request:
        request = Request(
            request_id=name,
            arrival_time=float(len(self.records)),
            num_prompt_tokens=draw.randint(200, 2_000),
            num_output_tokens=draw.randint(1, 200) if begun else 0,
        )
        buffer = RequestBuffer(ServiceLevel(consumption_rate_tps=RATE_TPS))
        record = self.records[name] = RequestRecord(
            request_id=name,
            buffer=buffer,
            arrival_s=-draw.uniform(10.0, 60.0),
            priority=len(self.records) % self._num_priorities,
        )
        if begun:
            buffer.generated(draw.randint(1, 200), 0.0)
            record.first_token_s = -10.0
            self.ledger.scheduled([name], -10.0)
            num_host_blocks = request.num_computed_tokens // BLOCK_SIZE
            record.kv = SimpleNamespace(
                mirrored=True,
                num_host_blocks=num_host_blocks,
                num_side_tokens=0,
                trunks=(),
                num_shared=0,
                offloaded=(),
            )
        return request

    def _run(self, request: Request) -> None:
        self.records[request.request_id].enter(State.RUNNING)
        self.running.append(request)

    def _wait(self, request: Request) -> None:
        keys = [(request.request_id, number) for number in range(request.num_tokens // BLOCK_SIZE)]
        for key in keys[: len(keys) // 2]:
            self.cache.publish(Column(key, (0,) * NUM_LAYERS, uid=0))
        self.keys[request.request_id] = keys
        self.waiting.append(request)

    def cached_prefix(self, request: Request) -> Sequence[Column]:
        keys, record = self.keys[request.request_id], self.records[request.request_id]
        return self.cache.find_again(record.prefix, keys, len(keys))

    def stretches(self, request: Request) -> Sequence[Stretch]:
        """Nothing is shared."""
        return ()

    def need_of(self, request: Request) -> Need:
        return Need(self.records[request.request_id], request.num_tokens)

    def num_step_load_blocks(self, needs: Sequence[Need]) -> int:
        return 0

    def num_returning_bytes(self) -> int:
        return 0

    def park(self, record: RequestRecord[Any]) -> None:
        """Nothing moves."""


def admission_for(crowd: Crowd, policy: str, seed: int) -> Admission[Any, Any]:
    engine: Any = Crowded(crowd, seed)
    engine.ledger.answer_lengths.ended(150)
    rates = Rates(
        h2d_bytes_per_s=crowd.link_bytes_per_s,
        d2h_bytes_per_s=crowd.link_bytes_per_s,
        step_s=0.03,
    )
    meter: Any = SimpleNamespace(rates=lambda: rates, costs=lambda: COSTS, prefill_frac=0.2)
    resumes: Any = SimpleNamespace(allow=lambda ways: None)
    line: Line[Any, Any] = Line(engine, resumes, lambda: rates)
    run = preset_of(full_name(policy)).run
    assert run is not None, f"{policy} decides nothing"
    return Admission(run, line, engine.ledger, meter)


def measured(crowd: Crowd, policy: str, num_draws: int) -> Row:
    changed, seen, same = [], [], []
    for seed in range(num_draws):
        admission = admission_for(crowd, policy, seed)
        changed.append(_cpu_s(admission.before_schedule))
        seen.append(_cpu_s(admission.snapshot))
        admission.before_schedule(0.0)
        same.append(_cpu_s(admission.before_schedule))
    figures = {"changed": changed, "snapshot": seen, "same": same}
    return {"crowd": crowd.name, "policy": policy} | {
        name: {f"p{at}": float(np.percentile(values, at)) for at in (50, 99)}
        for name, values in figures.items()
    }


def _cpu_s(call: Callable[[float], object]) -> float:
    begin_s = time.thread_time()
    call(0.0)
    return time.thread_time() - begin_s


def _cells(row: Row) -> list[str]:
    def ms(name: str) -> str:
        return " / ".join(f"{1e3 * row[name][at]:.2f}" for at in ("p50", "p99"))

    return [row["crowd"], ms("changed"), f"{1e3 * row['snapshot']['p50']:.2f}", ms("same")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="evenflow", help="its short name")
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    rows = (measured(crowd, options.policy, options.draws) for crowd in CROWDS)
    lines = ((row, _cells(row)) for row in rows)
    list(Table(f"Decisions of `{options.policy}`", COLUMNS, lines).printed())
    for crowd in CROWDS if options.profile else ():
        profile = cProfile.Profile(time.thread_time)
        for seed in range(options.draws):
            admission = admission_for(crowd, options.policy, seed)
            profile.runcall(admission.before_schedule, 0.0)
        print(f"\n{crowd.name}")
        pstats.Stats(profile).sort_stats("tottime").print_stats(12)


if __name__ == "__main__":
    main()
