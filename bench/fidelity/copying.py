"""What copies cost the engine beside their time on the link, fitted to calibration runs.

A run's sums say how long its steps were and how long its layers waited. The costs are those with
which the simulator's mean step and mean wait come closest to them, by Gauss-Newton.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from bench.e2e.records import RunRecord
from bench.e2e.systems import Device
from bench.fidelity.machine import Calibration
from bench.fidelity.replayed import simulated
from simulator.step import CopyCosts

FIRST = CopyCosts(submit_s=0.2e-3, landing_s_per_byte=1e-9, lead_frac=0.4)  # the search begins here
STEPS = {"submit_s": 0.05e-3, "landing_s_per_byte": 0.2e-9, "lead_frac": 0.1}  # of differences
NUM_ROUNDS = 2

Floats = npt.NDArray[np.float64]


def with_copies(calibration: Calibration, device: Device, runs: Sequence[RunRecord]) -> Calibration:
    """Return the calibration with the costs of copies; unchanged without runs."""
    if not runs:
        return calibration
    real = np.concatenate([_measured(run) for run in runs])

    def missing(costs: CopyCosts) -> Floats:
        """Return what the simulation lacks, relative to the real mean step."""
        given = replace(calibration, copies=costs)
        ours = np.concatenate([_simulated(run, device, given) for run in runs])
        lacking: Floats = (real - ours) / np.repeat(real[::2] + real[1::2], 2)
        return lacking

    costs = FIRST
    for _ in range(NUM_ROUNDS):
        now = missing(costs)
        slopes = np.stack(
            [
                (now - missing(replace(costs, **{name: getattr(costs, name) + step}))) / step
                for name, step in STEPS.items()
            ],
            axis=1,
        )
        change = np.linalg.lstsq(slopes, now, rcond=None)[0]
        moved = {
            name: max(0.0, getattr(costs, name) + float(by))
            for name, by in zip(STEPS, change, strict=True)
        }
        costs = replace(costs, **moved)
    return replace(calibration, copies=costs)


def _measured(run: RunRecord) -> Floats:
    """Return a real run's mean wait of a step, and the mean of the rest of it."""
    steps = run.sums["controller_num_steps"]
    stall_s = run.sums["kv_step_stall_s_sum"]
    return np.array([stall_s, run.sums["controller_step_s"] - stall_s]) / steps


def _simulated(run: RunRecord, device: Device, calibration: Calibration) -> Floats:
    totals = simulated(run, device, calibration).totals
    return np.array([totals.stall_s, totals.busy_s - totals.stall_s]) / totals.num_steps
