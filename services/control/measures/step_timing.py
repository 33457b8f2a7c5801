"""What a step told of its times, on its way from the ranks to the scheduler."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTime:
    """What one direction carried."""

    num_bytes: int
    busy_s: float  # it carried something
    num_copies: int  # chunks

    def aggregate(self, other: "CopyTime") -> "CopyTime":
        return CopyTime(
            num_bytes=self.num_bytes + other.num_bytes,
            busy_s=max(self.busy_s, other.busy_s),
            num_copies=max(self.num_copies, other.num_copies),
        )


NO_COPIES = CopyTime(num_bytes=0, busy_s=0.0, num_copies=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCalibration:
    """One rank's link, or that of several together: bytes summed, times of the slowest."""

    small_h2d: CopyTime
    large_h2d: CopyTime
    small_d2h: CopyTime
    large_d2h: CopyTime

    def aggregate(self, other: "LinkCalibration | None") -> "LinkCalibration":
        if other is None:
            return self
        return LinkCalibration(
            small_h2d=self.small_h2d.aggregate(other.small_h2d),
            large_h2d=self.large_h2d.aggregate(other.large_h2d),
            small_d2h=self.small_d2h.aggregate(other.small_d2h),
            large_d2h=self.large_d2h.aggregate(other.large_d2h),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """What one rank tells with a step, or several together: bytes are summed, times of the slowest.

    A device's layers are known a step or two later: their times are of step `step`.
    """

    step: int = 0  # that the next three are of; 0: of the one that they come with
    layer_s: float = 0.0  # compute of one layer, mean; 0: no layer ran, or nothing is known
    stall_s: float = 0.0  # in which layers waited for copies
    period_s: float | None = None  # from step to step on the device; None: the host's clock will do
    h2d: CopyTime = NO_COPIES
    d2h: CopyTime = NO_COPIES
    calibration: LinkCalibration | None = None  # with the first step only

    def aggregate(self, other: "StepTiming") -> "StepTiming":
        # Ranks that read different steps: the one that is behind holds the others up.
        late = min((t for t in (self, other) if t.layer_s), key=lambda t: t.step, default=self)
        same = [timing for timing in (self, other) if timing.step == late.step]
        periods_s = [timing.period_s for timing in same if timing.period_s is not None]
        return StepTiming(
            step=late.step,
            layer_s=max(timing.layer_s for timing in same),
            stall_s=max(timing.stall_s for timing in same),
            period_s=max(periods_s, default=None),
            h2d=self.h2d.aggregate(other.h2d),
            d2h=self.d2h.aggregate(other.d2h),
            calibration=self.calibration and self.calibration.aggregate(other.calibration),
        )
