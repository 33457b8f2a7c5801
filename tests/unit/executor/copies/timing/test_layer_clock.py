"""A rank's layer times, with a clock and a copy engine that a test sets."""

from types import SimpleNamespace
from typing import Any

import pytest

from services.control.measures.step_timing import CopyTime, LinkCalibration, StepTiming
from services.executor.copies.copy_engine import TransferTotals
from services.executor.copies.device.cpu_device import CpuEvent
from services.executor.copies.timing.layer_clock import LayerClock
from services.executor.copies.timing.step_marks import Mark, StepMarks


class Rank:
    """A runner that has stalled and copied as much as a test says."""

    def __init__(self) -> None:
        self.now_s, self.stall_s, self.num_loads = 100.0, 0.0, 0
        self.totals = TransferTotals()
        self.engine = SimpleNamespace(totals=lambda: self.totals)

    def clock(self, **options: Any) -> LayerClock:
        runner: Any = self
        return LayerClock(runner, StepMarks(self), num_layers=4, chunk_bytes=1_000, **options)

    def mark(self) -> Mark:
        return Mark(CpuEvent(self.now_s), self.stall_s)

    def has_passed(self, mark: Mark) -> bool:
        return True


def test_a_step_is_told_when_the_next_ones_layers_begin() -> None:
    """Layers take the time between the first and the last, less stalls."""
    rank = Rank()
    clock = rank.clock()
    rank.stall_s = 0.5  # before the first layer
    clock.marks.layers_begin(7)
    rank.now_s += 1.0
    rank.stall_s += 0.2
    clock.marks.layers_end()
    rank.now_s += 1.0
    clock.marks.layers_end()  # said twice
    assert clock.take() == StepTiming()
    clock.marks.layers_begin(8)

    timing = clock.take()

    assert (timing.step, timing.period_s) == (7, 2.0)
    assert timing.layer_s == pytest.approx((1.0 - 0.2) / 4)
    assert timing.stall_s == pytest.approx(0.2)
    assert clock.take() == StepTiming()


def test_a_step_that_others_without_layers_follow_has_no_period() -> None:
    rank = Rank()
    clock = rank.clock()
    for step in (7, 9):
        clock.marks.layers_begin(step)
        rank.now_s += 1.0
        clock.marks.layers_end()

    timing = clock.take()

    assert (timing.step, timing.period_s) == (7, None)
    assert timing.layer_s == pytest.approx(1.0 / 4)


def test_what_was_copied_is_told_once() -> None:
    rank = Rank()
    clock = rank.clock()
    rank.totals, rank.num_loads = TransferTotals(h2d_bytes=2_500, h2d_busy_s=0.1), 3
    first = clock.take()

    assert first.h2d == CopyTime(num_bytes=2_500, busy_s=0.1, num_copies=5)  # 3 loads, 2 chunks
    assert clock.take() == StepTiming()


def test_a_step_without_layers_measures_none() -> None:
    clock = Rank().clock()
    clock.marks.layers_end()

    assert clock.take().layer_s == 0.0


def test_the_calibration_goes_with_the_first_step_only() -> None:
    one = CopyTime(num_bytes=1, busy_s=1.0, num_copies=1)
    links = LinkCalibration(small_h2d=one, large_h2d=one, small_d2h=one, large_d2h=one)
    clock = Rank().clock(calibration=links)

    assert clock.take().calibration == links
    assert clock.take().calibration is None


def test_of_several_ranks_bytes_add_up_and_the_slowest_counts() -> None:
    first = StepTiming(
        layer_s=1.0, stall_s=0.1, h2d=CopyTime(num_bytes=10, busy_s=0.5, num_copies=1)
    )
    second = StepTiming(
        layer_s=0.5, stall_s=0.4, h2d=CopyTime(num_bytes=10, busy_s=0.7, num_copies=1)
    )

    both = first.aggregate(second)

    assert (both.layer_s, both.stall_s, both.period_s) == (1.0, 0.4, None)
    assert both.h2d == CopyTime(num_bytes=20, busy_s=0.7, num_copies=1)


def test_of_ranks_that_read_different_steps_the_later_reader_counts() -> None:
    early = StepTiming(step=8, layer_s=1.0, stall_s=0.5, period_s=9.0)
    late = StepTiming(step=7, layer_s=0.4, stall_s=0.1, period_s=3.0)
    silent = StepTiming()

    for timings in ([early, late, silent], [silent, late, early], [late, silent, early]):
        one, two, three = timings
        both = one.aggregate(two).aggregate(three)
        assert (both.step, both.layer_s, both.stall_s, both.period_s) == (7, 0.4, 0.1, 3.0)
