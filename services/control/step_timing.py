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
    """One step on one rank, or on several together: bytes are summed, times of the slowest."""

    layer_s: float = 0.0  # compute of one layer, mean; 0: no layer ran
    stall_s: float = 0.0  # in which layers waited for copies
    h2d: CopyTime = NO_COPIES
    d2h: CopyTime = NO_COPIES
    calibration: LinkCalibration | None = None  # with the first step only

    def aggregate(self, other: "StepTiming") -> "StepTiming":
        return StepTiming(
            layer_s=max(self.layer_s, other.layer_s),
            stall_s=max(self.stall_s, other.stall_s),
            h2d=self.h2d.aggregate(other.h2d),
            d2h=self.d2h.aggregate(other.d2h),
            calibration=self.calibration and self.calibration.aggregate(other.calibration),
        )
