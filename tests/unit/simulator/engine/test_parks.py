"""When a request that is parked makes room: the scheduler, and the simulated one, step by step."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from services.control.options import ControllerOptions
from services.executor.scheduler.scheduler import AsyncLayerwiseScheduler, LayerwiseScheduler
from services.placement.run.types import RunDecision, RunSnapshot
from services.placement.types import EngineShape, RequestId
from simulator.compose import make_engine
from simulator.device.costs import LinearCosts
from simulator.engine.engine import Engine
from simulator.engine.machine import Machine
from simulator.engine.planning import PlanningOptions
from simulator.engine.simulation import simulate
from simulator.engine.turns import Turn
from simulator.workload import ArrivingRequest
from tests.unit.executor.model_free_engine import NUM_GROUPS, ModelFreeEngine, slices_of
from tests.unit.executor.simulated_ranks import BLOCK_SIZE

pytestmark = pytest.mark.filterwarnings("default")

A, B, C = (RequestId(name) for name in "abc")
PROMPTS = {A: 5 * BLOCK_SIZE, B: 5 * BLOCK_SIZE, C: 6 * BLOCK_SIZE}
POSITIONS = 14  # two fit, with their answers; not all three
PARKED_IN = 3  # the step
NUM_STEPS = 7


class Turns:
    """A run policy: `a` and `b`, and from a step on `b` and `c`; at last all."""

    def __init__(self) -> None:
        self._num_asked = 0

    def __call__(self, snapshot: RunSnapshot) -> RunDecision:
        number, self._num_asked = self._num_asked, self._num_asked + 1
        if number < PARKED_IN:
            return RunDecision(run=(A, B))
        if number < NUM_STEPS:
            return RunDecision(run=(B, C), park=frozenset({A} if number == PARKED_IN else ()))
        return RunDecision(run=(B, C, A))


def steps_of_vllm(*, ahead: bool, copied: bool) -> list[str]:
    """Return which requests are in each step. `ahead`: one is scheduled while another runs."""
    scheduler_cls = AsyncLayerwiseScheduler if ahead else LayerwiseScheduler
    engine = ModelFreeEngine(
        num_blocks=POSITIONS * NUM_GROUPS + 1, num_slots=400, scheduler_cls=scheduler_cls
    )
    engine.scheduler.set_up(ControllerOptions(policy="evenflow"), None, Turns())
    for name, num_tokens in PROMPTS.items():
        engine.add(name, num_tokens)
    seen, under_way = [], []
    for _ in range(NUM_STEPS):
        output = engine.scheduler.schedule()
        names = output.num_scheduled_tokens
        seen.append(said((name, engine.kv(name).offloaded) for name in names))
        under_way.append(output)
        while len(under_way) > ahead:
            first = under_way.pop(0)
            batch = slices_of(first, engine.prompts)
            feedback = engine.run(first.kv_connector_metadata, batch)
            engine.take_in(first, feedback if copied else replace(feedback, saved_step=0))
    return seen


def steps_of_simulator(*, ahead: bool, copied: bool) -> list[str]:
    shape = EngineShape(
        num_layers=NUM_GROUPS,
        layers_per_group=1,
        block_size=BLOCK_SIZE,
        num_blocks=POSITIONS * NUM_GROUPS,
        block_bytes=1_000,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        num_host_blocks=400,
    )
    machine = Machine(
        costs=LinearCosts(layer_base_s=0.25),
        link_bytes_per_s=1e9 if copied else 1.0,
        schedules_ahead=ahead,
    )
    engine = make_engine(shape, machine, PlanningOptions(policy="evenflow"))
    assert engine.loop.admission is not None
    engine.loop.admission._policy = Turns()
    return batches_of(engine)


def batches_of(engine: Engine) -> list[str]:
    """Return what is in the first steps of the requests, which come at once."""
    scheduler, schedule, seen = engine.scheduler, engine.scheduler.schedule, list[str]()

    def noting(now_s: float) -> list[Turn]:
        turns = schedule(now_s)
        seen.append(said((t.request.request_id, t.request.kv.offloaded) for t in turns))
        return turns

    scheduler.schedule = noting
    requests = [
        ArrivingRequest(
            request_id=name, arrival_s=0.0, num_prompt_tokens=num_tokens, num_output_tokens=40
        )
        for name, num_tokens in PROMPTS.items()
    ]
    simulate(engine, requests)
    return seen[:NUM_STEPS]


def said(batch: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Name the requests of a step, each with how many of its layer groups are on the host."""
    return " ".join(f"{name}{len(offloaded) or ''}" for name, offloaded in sorted(batch))


@pytest.mark.parametrize(
    ("ahead", "copied", "first"),
    [
        (False, True, "b c"),
        (False, False, "b c"),
        # Its token is in flight. What is on the host leaves at once, the rest a step later.
        (True, True, "b c"),
        (True, False, "b"),
    ],
)
def test_a_parked_request_makes_room_in_the_same_step(
    ahead: bool, copied: bool, first: str
) -> None:
    engines = (steps_of_vllm, steps_of_simulator)
    theirs, ours = (engine(ahead=ahead, copied=copied)[PARKED_IN:] for engine in engines)

    assert ours == theirs
    assert ours[:2] == [first, "b c"]
