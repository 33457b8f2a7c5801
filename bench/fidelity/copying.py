"""What copies cost the engine beside their time on the link, fitted to calibration runs.

A run's sums say how long its steps were and how long its layers waited. The costs are those with
which the simulator's mean step and mean wait come closest to them, by Gauss-Newton. Absolute
deviations are summed, not squares: a run that something disturbed moves the costs little.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from bench.e2e.records import RunRecord
from bench.e2e.systems import Device
from bench.fidelity.machine import Calibration
from bench.fidelity.replayed import simulated
from simulator.step import CopyCosts

FIRST = CopyCosts(submit_s=0.2e-3, landing_s_per_byte=1e-9, lead_frac=0.4)  # the search begins here
STEPS = {"submit_s": 0.05e-3, "landing_s_per_byte": 0.2e-9, "lead_frac": 0.1}  # of differences
MOST = {"submit_s": 5e-3, "landing_s_per_byte": 10e-9, "lead_frac": 1.0}
NUM_ROUNDS = 2
NUM_WEIGHTINGS = 30
LEAST_DEVIATION = 1e-4  # what deviates less has the weight of this

Floats: TypeAlias = npt.NDArray[np.float64]
Map: TypeAlias = Callable[[Callable[[RunRecord], Floats], Sequence[RunRecord]], Iterable[Floats]]


def with_copies(
    calibration: Calibration, device: Device, runs: Sequence[RunRecord], *, over: Map = map
) -> Calibration:
    """Return the calibration with the costs of copies; unchanged without runs.

    `over` applies a function to all runs, maybe in parallel.
    """
    if not runs:
        return calibration
    real = np.concatenate([_measured(run) for run in runs])

    def missing(costs: CopyCosts) -> Floats:
        """Return what the simulation lacks, relative to the real mean step."""
        given = replace(calibration, copies=costs)
        simulate = partial(_simulated, device=device, calibration=given)
        ours = np.concatenate(list(over(simulate, runs)))
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
        change = _least_deviating(slopes, now)
        moved = {
            name: min(MOST[name], max(0.0, getattr(costs, name) + float(by)))
            for name, by in zip(STEPS, change, strict=True)
        }
        costs = replace(costs, **moved)
    return replace(calibration, copies=costs)


def _least_deviating(slopes: Floats, values: Floats) -> Floats:
    """Return x with the least sum of |values - slopes x|, by reweighted squares."""
    found: Floats = np.zeros(slopes.shape[1])
    for _ in range(NUM_WEIGHTINGS):
        left = np.maximum(np.abs(values - slopes @ found), LEAST_DEVIATION)
        weights = 1.0 / np.sqrt(left)
        found = np.linalg.lstsq(slopes * weights[:, None], values * weights, rcond=None)[0]
    return found


def _measured(run: RunRecord) -> Floats:
    """Return a real run's mean wait of a step, and the mean of the rest of it."""
    steps = run.sums["controller_num_steps"]
    stall_s = run.sums["kv_step_stall_s_sum"]
    return np.array([stall_s, run.sums["controller_step_s"] - stall_s]) / steps


def _simulated(run: RunRecord, device: Device, calibration: Calibration) -> Floats:
    totals = simulated(run, device, calibration).totals
    return np.array([totals.stall_s, totals.busy_s - totals.stall_s]) / totals.num_steps
