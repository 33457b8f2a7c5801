"""The closed loop as it is, on streams that run behind the host: it asks, acts, and foresees."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from lab.planning.snapshots import make_engine
from services.control.measures.link_rate import LinkRate
from services.control.measures.step_timing import StepTiming
from services.control.options import ControllerOptions
from services.control.plans.planner import PlanAnswer
from services.control.step_loop import StepLoop
from services.control.step_meter import StepReading
from services.control.types import Links, ScheduledStep, Trigger
from services.placement.types import (
    EngineShape,
    Placement,
    Plan,
    PlanStatus,
    Quality,
    RequestId,
    Snapshot,
)
from tests.unit.control.fake_engine import FakeEngine, FakePlanner
from tests.unit.executor.copies.device import test_device_clock
from tests.unit.executor.copies.device.test_device_clock import (
    BLOCK_SIZE,
    LAYER_S,
    NUM_BLOCKS,
    NUM_LAYERS,
    OUTSIDE_S,
    PAGE_BYTES,
    Loop,
    Seam,
)

CONTEXT = NUM_BLOCKS * BLOCK_SIZE


class PlannedEngine(FakeEngine):
    """One request, placed as the plan in force says."""

    def __init__(self) -> None:
        super().__init__("r")
        self._seam = Seam()

    @property
    def offloaded(self) -> tuple[int, ...]:
        return self.placed.get("r", ())

    @property
    def shape(self) -> EngineShape:
        return make_engine(num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, block_bytes=PAGE_BYTES)

    def links(self, h2d: LinkRate, d2h: LinkRate) -> Links:
        return self._seam.links(h2d, d2h)

    def follow(self) -> None:
        """Have its KV be where the plan says."""
        kv: Any = self.records["r"].kv
        kv.num_tokens = kv.num_own_tokens = CONTEXT
        kv.offloaded = self.offloaded
        kv.num_buffers = 2 if self.offloaded else 0


class ControlledLoop(Loop):
    """The rank and its device, with a whole step loop in the meter's place."""

    def __post_init__(self) -> None:
        super().__post_init__()
        engine: Any = PlannedEngine()
        self.seam = engine
        self.planner = FakePlanner()
        self.loop = StepLoop(
            ControllerOptions(planner_address="x", mismatch_frac=0.1),
            engine.line(),
            self.planner,
            None,
            lambda: self.device.host_s,
        )
        meter: Any = self
        self.meter = meter
        self.loop.note(Trigger.ADMITTED)

    def scheduled(self, step: ScheduledStep) -> None:
        self.seam.follow()
        self.loop.after_schedule(replace(step, request_ids=("r",)), self.device.host_s)

    def ended(self, timing: StepTiming, now_s: float, *, busy: bool) -> StepReading:
        self.loop.after_update(timing, busy=busy)
        return StepReading(step_s=0.0, mismatch=False)

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            before = self.seam.offloaded
            self.loop.before_schedule()
            after = self.seam.offloaded
            self.run(1, self.place(*after) if after != before else None)

    def place(self, *groups: int) -> Any:
        """Return the message that offloads groups; where they are is the plan's to say."""
        seam, self.seam = self.seam, Seam()
        try:
            return super().place(*groups)
        finally:
            self.seam = seam

    def answer(self, *layers: int) -> None:
        """Let the planner answer its newest question: these layers leave, in two buffers."""
        epoch = self.planner.asked[-1].epoch
        placement = Placement(
            request_id=RequestId("r"),
            offloaded_layers=layers,
            num_prefetch_buffers=2,
            paused=False,
        )
        quality = Quality(
            latency_s=0.01,
            mean_latency_s=0.01,
            first_latency_s=0.01,
            objective_s=0.01,
            lower_bound_s=0.01,
            window=1_000,
            expires_after=2_000,
            num_nodes=0,
            serve_all=PlanStatus.FEASIBLE,
        )
        plan = Plan(
            epoch=epoch,
            policy="orbitflow",
            status=PlanStatus.FEASIBLE,
            placements=(placement,),
            quality=quality,
        )
        self.planner.answers.append(PlanAnswer(epoch=epoch, plan=plan))


@pytest.fixture(params=[1e9, 1e6], ids=["fast-link", "slow-link"])
def loop(request: pytest.FixtureRequest) -> Iterator[ControlledLoop]:
    loop = ControlledLoop(request.param)
    yield loop
    loop.device.finish()
    loop.engine.close()


def assert_measured(loop: ControlledLoop, snapshot: Snapshot) -> None:
    assert snapshot.profile is not None
    assert snapshot.profile.layer_s(1, CONTEXT) == pytest.approx(LAYER_S)
    assert snapshot.profile.outside_layers_s == pytest.approx(OUTSIDE_S)
    assert snapshot.h2d is not None
    assert snapshot.h2d.bytes_per_s == pytest.approx(loop.bytes_per_s, rel=0.05)


def test_the_planner_is_told_a_devices_times_before_anything_was_loaded(
    loop: ControlledLoop,
) -> None:
    loop.step(12)

    (snapshot,) = loop.planner.asked
    assert_measured(loop, snapshot)


@pytest.mark.parametrize("layers", [(3, 7), (1, 3, 5, 7), tuple(range(NUM_LAYERS))])
def test_steps_take_what_was_predicted_for_the_plan_that_is_carried_out(
    loop: ControlledLoop, layers: tuple[int, ...]
) -> None:
    loop.step(12)
    loop.answer(*layers)
    loop.step(30)

    assert loop.loop.counts.plans["applied"] == 1
    assert loop.seam.offloaded == layers
    assert loop.runner.num_loads >= len(layers) * 25
    sums = loop.loop.counts.sums
    assert sums["num_predicted_steps"] >= 25
    assert sums["abs_error_s"] <= 0.001 * sums["measured_step_s"]
    assert loop.loop.counts.triggers["mismatch"] == 0
    assert len(loop.planner.asked) == 1

    loop.loop.note(Trigger.ADMITTED)
    loop.step()
    assert_measured(loop, loop.planner.asked[-1])  # what layers waited for is none of their time


def test_a_device_that_slows_down_is_asked_about_anew(
    loop: ControlledLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.step(12)
    monkeypatch.setattr(test_device_clock, "LAYER_S", 2 * LAYER_S)
    loop.step(60)

    assert loop.loop.counts.triggers["mismatch"] >= 1
    newest = loop.planner.asked[-1]
    assert newest.epoch > 1
    assert newest.profile is not None
    assert newest.profile.layer_s(1, CONTEXT) > 1.5 * LAYER_S
