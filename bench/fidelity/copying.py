"""What copies cost the engine beside their time on the link, fitted to calibration runs.

It is the cost with which the quantiles of the simulator's gaps between tokens come closest to those
of the runs, by Gauss-Newton. The longest gaps are left out: prompts, pauses and preemptions make
them. Absolute deviations are summed, not squares: a run that something disturbed moves the cost
little.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from bench.e2e.figures import quantile
from bench.e2e.records import RunRecord
from bench.e2e.systems import Device
from bench.fidelity.machine import Calibration
from bench.fidelity.replayed import complete, replayed
from simulator.device.step import CopyCosts

QUANTILES = tuple(k / 20 for k in range(1, 17))  # 5 % to 80 %
FIRST_S = 0.15e-3  # of the submission of one request's layer group: the search begins here
STEP_S = 0.05e-3  # of differences
MOST_S = 5e-3
NUM_ROUNDS = 3

Floats: TypeAlias = npt.NDArray[np.float64]
Map: TypeAlias = Callable[[Callable[[RunRecord], Floats], Sequence[RunRecord]], Iterable[Floats]]


def with_copies(
    calibration: Calibration, device: Device, runs: Sequence[RunRecord], *, over: Map = map
) -> Calibration:
    """Return the calibration with the cost of copies; unchanged without runs.

    `over` applies a function to all runs, maybe in parallel.
    """
    if not runs:
        return calibration
    real = np.concatenate([_gaps_s(complete(run)) for run in runs])

    def given(submit_s: float) -> Calibration:
        return replace(calibration, copies=CopyCosts(submit_s=submit_s))

    def missing(submit_s: float) -> Floats:
        """Return what the simulated gaps lack, relative to the real ones."""
        simulate = partial(_simulated_gaps_s, device=device, calibration=given(submit_s))
        lacking: Floats = 1.0 - np.concatenate(list(over(simulate, runs))) / real
        return lacking

    submit_s = FIRST_S
    for _ in range(NUM_ROUNDS):
        now = missing(submit_s)
        slopes = (now - missing(submit_s + STEP_S)) / STEP_S
        submit_s = min(MOST_S, max(0.0, submit_s + _least_deviating(slopes, now)))
    return given(submit_s)


def _least_deviating(slopes: Floats, values: Floats) -> float:
    """Return the x with the least sum of |values - slopes x|: a weighted median of the ratios."""
    counted = slopes != 0.0
    if not counted.any():
        return 0.0
    ratios, weights = values[counted] / slopes[counted], np.abs(slopes[counted])
    order = np.argsort(ratios)
    half = np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2.0)
    return float(ratios[order][half])


def _simulated_gaps_s(run: RunRecord, device: Device, calibration: Calibration) -> Floats:
    return _gaps_s(replayed(run, device, calibration))


def _gaps_s(run: RunRecord) -> Floats:
    """Return quantiles of the gaps between the tokens of a request."""
    gaps_s = [b - a for request in run.requests for a, b in pairwise(request.generated_s)]
    return np.array([quantile(gaps_s, q) for q in QUANTILES])
