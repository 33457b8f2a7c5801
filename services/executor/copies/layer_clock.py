"""How long a step's layers took on one rank, and what its links carried meanwhile.

Read on the engine's thread, around layers that have run when the hooks return: on a device that
runs ahead of Python the figures are those of launching, not of running.
"""

import time
from collections.abc import Callable

from services.control.step_timing import CopyTime, LinkCalibration, StepTiming
from services.executor.copies.copy_engine import TransferTotals
from services.executor.copies.transfer_runner import TransferRunner


class LayerClock:
    """Marks the first layer's beginning and the last one's end; one `take` per step."""

    def __init__(
        self,
        runner: TransferRunner,
        *,
        num_layers: int,
        chunk_bytes: int,
        calibration: LinkCalibration | None = None,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`num_layers`: of this rank."""
        self._runner, self._now_s = runner, now_s
        self._num_layers, self._chunk_bytes = num_layers, chunk_bytes
        self._calibration = calibration
        self._first_s: float | None = None  # the first layer's beginning in this step
        self._first_stall_s = 0.0  # stalls before it, since the engine started
        self._layers_s = 0.0
        self._taken_stall_s = runner.stall_s
        self._taken_totals: TransferTotals = runner.engine.totals()
        self._taken_loads = runner.num_loads

    def layer_begins(self) -> None:
        """Note that a step's layers are about to run; only a step's first call counts."""
        if self._first_s is None:
            self._first_s, self._first_stall_s = self._now_s(), self._runner.stall_s

    def step_ends(self) -> None:
        """Note that the last layer has run."""
        if self._first_s is not None:
            stalled_s = self._runner.stall_s - self._first_stall_s
            self._layers_s = max(0.0, self._now_s() - self._first_s - stalled_s)
            self._first_s = None

    def take(self) -> StepTiming:
        """Return what happened since the last call."""
        runner, totals, before = self._runner, self._runner.engine.totals(), self._taken_totals
        h2d_bytes = totals.h2d_bytes - before.h2d_bytes
        d2h_bytes = totals.d2h_bytes - before.d2h_bytes
        timing = StepTiming(
            layer_s=self._layers_s / max(1, self._num_layers),
            stall_s=runner.stall_s - self._taken_stall_s,
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
        self._layers_s, self._calibration = 0.0, None
        self._taken_stall_s, self._taken_totals = runner.stall_s, totals
        self._taken_loads = runner.num_loads
        return timing
