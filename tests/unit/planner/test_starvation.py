"""Over long runs nobody starves and nobody flaps, whoever comes and goes."""

import dataclasses
from collections import Counter
from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.planning.snapshots import make_request, make_snapshot
from services.placement.types import (
    Placement,
    Plan,
    RequestPhase,
    RequestState,
    Snapshot,
)
from services.planner.policy.policies import make_plan
from services.planner.solver.budget import NodeBudget
from tests.fuzz import examples
from tests.planning import optimiser

pytestmark = pytest.mark.timeout(3_600)  # the first run compiles the kernels

TICK_S = 0.25
TOKENS_PER_TICK = 8
CHUNK_PER_TICK = 4_000
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 3.0
NODES = 60


@dataclasses.dataclass(frozen=True)
class Arrival:
    tick: int
    num_tokens: int
    slo_tbt_s: float | None
    lifetime: int  # ticks of running until it is complete, after its prompt


@dataclasses.dataclass
class Clockwork:
    """An engine that obeys each plan and asks again every quarter of a second."""

    num_blocks: int
    now_s: float = 0.0
    last_completion_s: float | None = None
    requests: dict[str, RequestState] = dataclasses.field(default_factory=dict)
    left: Counter[str] = dataclasses.field(default_factory=Counter)
    spans: dict[str, list[tuple[float, float | None]]] = dataclasses.field(default_factory=dict)
    completions_s: list[float] = dataclasses.field(default_factory=list)
    gone: set[str] = dataclasses.field(default_factory=set)

    def arrive(self, name: str, arrival: Arrival) -> None:
        prompt = arrival.num_tokens
        self.requests[name] = make_request(
            name,
            prompt,
            phase=RequestPhase.PREFILL,
            num_prompt_tokens=prompt,
            num_output_tokens=0,
            num_computed_tokens=0,
            num_host_blocks=(0,) * 8,
            slo_tbt_s=arrival.slo_tbt_s,
        )
        self.left[name], self.spans[name] = arrival.lifetime, []

    def snapshot(self, epoch: int) -> Snapshot:
        ago = None if self.last_completion_s is None else self.now_s - self.last_completion_s
        return make_snapshot(
            *self.requests.values(),
            epoch=epoch,
            num_free_blocks=self.num_blocks,
            last_completion_age_s=ago,
            alpha=0.0,
            min_pause_s=MIN_PAUSE_S,
            max_pause_s=MAX_PAUSE_S,
            max_window=8,
        )

    def obey(self, plan: Plan) -> None:
        for placement in plan.placements:
            spans = self.spans[placement.request_id]
            was = self.requests[placement.request_id].phase is RequestPhase.PAUSED
            if placement.paused and not was:
                spans.append((self.now_s, None))
            if was and not placement.paused:
                spans[-1] = (spans[-1][0], self.now_s)
        self.now_s += TICK_S
        for placement in plan.placements:
            self._advance(str(placement.request_id), placement)

    def _advance(self, name: str, placement: Placement) -> None:
        request, spans = self.requests[name], self.spans[name]
        prefill = request.phase is RequestPhase.PREFILL
        room = request.num_prompt_tokens - request.num_computed_tokens
        growth = min(CHUNK_PER_TICK, room) if prefill else TOKENS_PER_TICK
        growth = 0 if placement.paused else growth
        tokens = request.num_computed_tokens + growth
        phase = RequestPhase.PREFILL if prefill and growth < room else RequestPhase.DECODING
        resumed = [end for _, end in spans if end is not None]
        self.requests[name] = dataclasses.replace(
            request,
            phase=RequestPhase.PAUSED if placement.paused else phase,
            paused_age_s=self.now_s - spans[-1][0] if placement.paused else None,
            resumed_age_s=self.now_s - resumed[-1] if resumed else None,
            num_output_tokens=request.num_output_tokens + (0 if prefill else growth),
            num_computed_tokens=tokens,
            offloaded_layers=placement.offloaded_layers,
            num_prefetch_buffers=placement.num_prefetch_buffers,
            num_host_blocks=(tokens // 16,) * 8,
        )
        self.left[name] -= int(growth > 0 and not prefill)
        if self.left[name] <= 0 and not placement.paused:
            del self.requests[name]
            self.gone.add(name)
            self.last_completion_s = self.now_s
            self.completions_s.append(self.now_s)

    def completed_in(self, start_s: float, end_s: float) -> bool:
        return any(start_s < at_s <= end_s + 1e-9 for at_s in self.completions_s)


def run(engine: Clockwork, arrivals: list[Arrival], num_ticks: int) -> None:
    """Run an engine and check, at each tick, that somebody runs."""
    for tick in range(num_ticks):
        for number, arrival in enumerate(arrivals):
            if arrival.tick == tick:
                engine.arrive(f"r{number}", arrival)
        if not engine.requests:
            engine.now_s += TICK_S
            continue
        plan = make_plan(engine.snapshot(tick + 1), NodeBudget(NODES), optimiser())
        assert any(not placement.paused for placement in plan.placements)
        engine.obey(plan)


def check_pauses(engine: Clockwork) -> int:
    """Check every pause of a run; returns how many there were."""
    for name, spans in engine.spans.items():
        for (start, end), following in zip_longest(spans, spans[1:]):
            assert end is not None or name in engine.requests  # nobody completes while paused
            lasted = (engine.now_s if end is None else end) - start
            assert lasted <= MAX_PAUSE_S + TICK_S  # and the tick until it is noticed
            completed = end is not None and engine.completed_in(start, end)
            assert end is None or lasted >= MIN_PAUSE_S - 1e-9 or completed
            if following is not None and end is not None:
                assert following[0] - end >= MIN_PAUSE_S - 1e-9
    return sum(len(spans) for spans in engine.spans.values())


def pool_for(arrivals: list[Arrival], num_ticks: int, spare: int) -> int:
    """Return a pool that holds all requests of a run at once, with everything offloaded."""
    blocks = 0
    for arrival in arrivals:
        tokens = arrival.num_tokens + num_ticks * TOKENS_PER_TICK
        # One buffer; an open block and one that is being sealed per layer; the running chunk.
        blocks += tokens // 16 + 8 * 2 + 8 * (CHUNK_PER_TICK // 16)
    return blocks + spare


SLOS = st.none() | st.sampled_from([0.012, 0.02, 0.04, 0.1])


@st.composite
def arrivals_of(draw: st.DrawFn, num_ticks: int) -> list[Arrival]:
    return [
        Arrival(
            tick=draw(st.integers(0, num_ticks // 2)) if i > 1 else 0,
            num_tokens=draw(st.integers(2, 20)) * 1_000,
            slo_tbt_s=draw(SLOS),
            lifetime=draw(st.integers(4, num_ticks)),
        )
        for i in range(draw(st.integers(2, 6)))
    ]


NUM_TICKS = 64


@pytest.mark.parametrize("spare", [0, 500, 2_000, 4_000])
@given(arrivals=arrivals_of(NUM_TICKS))
@settings(max_examples=examples(2))
def test_nobody_starves_and_nobody_flaps(arrivals: list[Arrival], spare: int) -> None:
    engine = Clockwork(pool_for(arrivals, NUM_TICKS, spare))

    run(engine, arrivals, NUM_TICKS)

    check_pauses(engine)


def test_a_long_crowded_run_pauses_and_still_completes_everybody() -> None:
    # Too many for their SLO most of the time: without pauses nobody would keep 20 ms.
    random = np.random.default_rng(23)
    arrivals = [
        Arrival(
            tick=int(6 * i),
            num_tokens=int(random.integers(8, 24)) * 1_000,
            slo_tbt_s=0.02,
            lifetime=int(random.integers(8, 40)),
        )
        for i in range(10)
    ]
    engine = Clockwork(pool_for(arrivals[:4], 60, 0))

    run(engine, arrivals, 250)

    assert check_pauses(engine) >= 10
    assert engine.gone == {f"r{i}" for i in range(10)}
