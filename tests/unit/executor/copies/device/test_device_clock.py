"""The closed loop's times on streams that run behind the host: they are the device's own."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lab.fake_streams import FakeDevice, FakeEvent
from lab.planning.snapshots import make_engine
from services.control.measures.link_rate import LinkRate
from services.control.measures.prediction import PlacedRequest, predicted_step_s
from services.control.measures.step_timing import StepTiming
from services.control.measures.tokens_per_step import TokensPerStep
from services.control.plans.counts import ControllerCounts
from services.control.step_meter import StepMeter
from services.control.types import Links, ScheduledStep
from services.executor.copies.device.stream_copy_engine import StreamCopyEngine
from services.executor.copies.pages import GroupPages
from services.executor.copies.timing.layer_clock import LayerClock
from services.executor.copies.timing.link_calibration import calibrate
from services.executor.copies.timing.step_marks import MAX_UNREAD_STEPS, StepMarks
from services.executor.copies.transfer_runner import TransferRunner
from services.executor.step_messages import (
    LoadTableUpdate,
    PrefixSlots,
    StagingUpdate,
    StepTransfers,
)

NUM_LAYERS, BLOCK_SIZE, NUM_BLOCKS, PAGE_BYTES = 8, 16, 4, 4096
LAYER_S, OUTSIDE_S = 1e-3, 2e-3
LOAD_BYTES = NUM_BLOCKS * PAGE_BYTES
STEPS_AHEAD = 2


class Seam:
    """One request in a batch of its own, placed as a test says."""

    def __init__(self) -> None:
        self.offloaded: tuple[int, ...] = ()
        self.tokens_per_step = TokensPerStep()
        self.shape = make_engine(
            num_layers=NUM_LAYERS, layers_per_group=1, block_size=BLOCK_SIZE, block_bytes=PAGE_BYTES
        )

    def links(self, h2d: LinkRate, d2h: LinkRate) -> Links:
        h2d_link, d2h_link = (
            rate.link(chunk_bytes=LOAD_BYTES, num_queued_bytes=0) for rate in (h2d, d2h)
        )
        return Links(h2d=h2d_link, d2h=d2h_link)

    def placed(self) -> list[PlacedRequest]:
        return [
            PlacedRequest(
                num_tokens=NUM_BLOCKS * BLOCK_SIZE,
                num_own_tokens=NUM_BLOCKS * BLOCK_SIZE,
                offloaded=self.offloaded,
                num_buffers=2 if self.offloaded else 0,
            )
        ]


@dataclass
class Loop:
    """A rank that launches decode steps ahead of its device, and the meter that hears of them."""

    bytes_per_s: float

    def __post_init__(self) -> None:
        self.device = FakeDevice(bytes_per_s=self.bytes_per_s)
        pool, host = (torch.zeros((32, PAGE_BYTES), dtype=torch.uint8) for _ in range(2))
        pages = [GroupPages(pool=(pool,), host=(host,)) for _ in range(NUM_LAYERS)]
        self.engine = StreamCopyEngine(pages, self.device)
        self.runner = TransferRunner(self.engine, NUM_LAYERS)
        self.marks = StepMarks(self.engine)
        self.clock = LayerClock(
            self.runner,
            self.marks,
            num_layers=NUM_LAYERS,
            chunk_bytes=LOAD_BYTES,
            calibration=calibrate(self.engine, num_blocks=NUM_BLOCKS, chunk_blocks=NUM_BLOCKS),
        )
        self.seam = Seam()
        seam: Any = self.seam
        self.counts = ControllerCounts()
        self.meter = StepMeter(seam, seam, self.counts, mismatch_frac=0.1)
        self.timings: list[StepTiming] = []
        self.num_mismatches = 0
        self._step = 0
        self._launched: deque[tuple[FakeEvent, StepTiming]] = deque()
        self.device.host_s = 0.0

    def place(self, *groups: int) -> StepTransfers:
        """Offload groups; return the next step's message."""
        self.seam.offloaded = groups
        blocks = list(range(NUM_BLOCKS))
        staging = [[8 + block for block in blocks], [16 + block for block in blocks]]
        return StepTransfers(
            step=0,
            prefixes=[PrefixSlots("r", blocks, [blocks] * NUM_LAYERS)],
            num_staging={"r": 2},
            staging_updates=[StagingUpdate("r", n, 0, ids) for n, ids in enumerate(staging)],
            table_updates=[
                LoadTableUpdate("r", group, True, ordinal % 2, [range(NUM_BLOCKS)])
                for ordinal, group in enumerate(groups)
            ],
        )

    def run(self, num_steps: int, transfers: StepTransfers | None = None) -> None:
        for _ in range(num_steps):
            self.launch(transfers or StepTransfers(step=0), same_batch=transfers is None)
            transfers = None
            while len(self._launched) >= STEPS_AHEAD:
                self._end_oldest()

    def launch(self, transfers: StepTransfers, *, same_batch: bool = True) -> None:
        self._step += 1
        transfers.step = self._step
        transfers.loading = ["r"] if self.seam.offloaded else []
        self.meter.scheduled(
            ScheduledStep(
                number=self._step,
                scheduled_s=self.device.compute.time_s,
                num_tokens=1,
                num_context_tokens=NUM_BLOCKS * BLOCK_SIZE,
                num_prefill_tokens=0,
                num_prefill_pairs=0,
                same_batch=same_batch,
                undisturbed=True,
            )
        )
        self.runner.take_in(transfers)
        self.runner.begin_step(transfers)
        self.marks.layers_begin(self._step)
        for group in range(NUM_LAYERS):
            self.runner.before_group(group)
            self.device.compute_for(LAYER_S)
            self.runner.after_group(group)
        self.marks.layers_end()
        self.runner.end_step()
        self.runner.feedback()
        timing = self.clock.take()
        self.device.compute_for(OUTSIDE_S)
        self._launched.append((self.device.compute.record(timing=True), timing))

    def _end_oldest(self) -> None:
        """Let the output of the oldest step come: its device is that far."""
        end, timing = self._launched.popleft()
        end.synchronize()
        self.device.host_s = end.time_s
        self.timings.append(timing)
        self.num_mismatches += self.meter.ended(timing, end.time_s, busy=True).mismatch


@pytest.fixture(params=[1e9, 1e6], ids=["fast-link", "slow-link"])
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    loop = Loop(request.param)
    yield loop
    loop.device.finish()
    loop.engine.close()


def assert_measured(loop: Loop) -> None:
    profile = loop.meter.profile.profile()
    assert profile is not None
    assert profile.layer_s(1, NUM_BLOCKS * BLOCK_SIZE) == pytest.approx(LAYER_S)
    assert profile.outside_layers_s == pytest.approx(OUTSIDE_S)


def test_layers_take_what_they_take_on_the_device_though_the_host_launches_them_at_once(
    loop: Loop,
) -> None:
    loop.run(12)

    assert_measured(loop)
    told = [timing for timing in loop.timings if timing.step]
    assert len(told) >= 12 - STEPS_AHEAD - 1
    assert [timing.step for timing in told] == sorted({timing.step for timing in told})
    for timing in told:
        assert timing.period_s == pytest.approx(NUM_LAYERS * LAYER_S + OUTSIDE_S)
        assert timing.stall_s == 0.0


def test_stalls_are_those_of_their_own_step_however_long(loop: Loop) -> None:
    """One group of four: on the slow link its copy takes longer than the step's layers."""
    loop.run(8)
    loop.run(16, loop.place(3, 7))
    copy_s = LOAD_BYTES / loop.bytes_per_s

    assert_measured(loop)
    newest = loop.timings[-1]
    assert newest.period_s is not None
    assert newest.layer_s == pytest.approx(LAYER_S)
    # Both copies start with the step: one is there by layer 3 or late, the other follows it.
    stalls_s = max(0.0, copy_s - 3 * LAYER_S)
    stalls_s += max(0.0, 2 * copy_s - stalls_s - 7 * LAYER_S)
    assert newest.stall_s == pytest.approx(stalls_s)
    assert newest.period_s == pytest.approx(NUM_LAYERS * LAYER_S + OUTSIDE_S + stalls_s)


@pytest.mark.parametrize("groups", [(1, 3, 5, 7), (3, 7), tuple(range(NUM_LAYERS))])
def test_what_is_predicted_from_resident_steps_is_what_the_device_takes(
    loop: Loop, groups: tuple[int, ...]
) -> None:
    loop.run(8)
    assert loop.meter.take_reference() is not None  # before anything was ever loaded
    loop.run(16, loop.place(*groups))
    reference = loop.meter.take_reference()
    assert reference is not None
    profile, links = reference

    period_s = loop.timings[-1].period_s
    predicted_s = predicted_step_s(loop.seam.placed(), loop.seam.shape, profile, links.h2d)
    assert predicted_s == pytest.approx(period_s, rel=0.05)
    assert loop.num_mismatches == 0


def test_a_device_that_slows_down_is_noticed(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.run(12)
    loop.meter.take_reference()
    monkeypatch.setattr(f"{__name__}.LAYER_S", 2 * LAYER_S)
    loop.run(40)

    assert loop.num_mismatches > 0


def test_marks_that_nobody_reads_are_bounded(loop: Loop) -> None:
    loop.device.stall()
    for _ in range(MAX_UNREAD_STEPS + 5):
        loop.launch(StepTransfers(step=0))
    loop.device.resume()
    loop.device.finish()

    assert loop.marks.num_dropped == 5
    newest = loop.clock.take()
    assert newest.step == MAX_UNREAD_STEPS + 4  # all but the last, which has no successor
    assert newest.layer_s == pytest.approx(LAYER_S)
    assert loop.clock.take().step == 0
