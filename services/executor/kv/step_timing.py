"""What a step told of its times, on its way from the ranks to the scheduler."""

from dataclasses import dataclass

from services.executor.kv.link_calibration import NO_COPIES, CopyTime, LinkCalibration


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
