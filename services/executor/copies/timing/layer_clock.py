"""What a rank tells of its times with each step: its layers', and what its links carried."""

from services.control.measures.step_timing import CopyTime, LinkCalibration, StepTiming
from services.executor.copies.copy_engine import TransferTotals
from services.executor.copies.timing.step_marks import StepMarks
from services.executor.copies.transfer_runner import TransferRunner


class LayerClock:
    """Turns marks and running totals into what is new since the last report."""

    def __init__(
        self,
        runner: TransferRunner,
        marks: StepMarks,
        *,
        num_layers: int,
        chunk_bytes: int,
        calibration: LinkCalibration | None = None,
    ) -> None:
        """`num_layers`: of this rank."""
        self.marks = marks
        self._runner = runner
        self._num_layers, self._chunk_bytes = num_layers, chunk_bytes
        self._calibration = calibration
        self._taken_totals: TransferTotals = runner.engine.totals()
        self._taken_loads = runner.num_loads

    def take(self) -> StepTiming:
        """Return what became known since the last call."""
        runner, totals, before = self._runner, self._runner.engine.totals(), self._taken_totals
        layers = self.marks.take()
        h2d_bytes = totals.h2d_bytes - before.h2d_bytes
        d2h_bytes = totals.d2h_bytes - before.d2h_bytes
        timing = StepTiming(
            step=layers.step,
            layer_s=layers.layers_s / max(1, self._num_layers),
            stall_s=layers.stall_s,
            period_s=layers.period_s,
            h2d=CopyTime(
                num_bytes=h2d_bytes,
                busy_s=totals.h2d_busy_s - before.h2d_busy_s,
                # As plans count them, request by request, though loads share copies.
                num_copies=runner.num_loads - self._taken_loads + h2d_bytes // self._chunk_bytes,
            ),
            d2h=CopyTime(
                num_bytes=d2h_bytes,
                busy_s=totals.d2h_busy_s - before.d2h_busy_s,
                num_copies=-(-d2h_bytes // self._chunk_bytes),
            ),
            calibration=self._calibration,
        )
        self._calibration = None
        self._taken_totals, self._taken_loads = totals, runner.num_loads
        return timing
