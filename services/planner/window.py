"""A placement over the coming decode steps: contexts grow, the placement stays (section 3.3.1).

Step t of the window (from 0) reads the KV of n_r + t tokens and leaves n_r + t + 1 behind.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from services.placement.batch import SEALING_STEPS
from services.planner import kernels
from services.planner.jit import compiled
from services.planner.library import Floats, Ints

WINDOW_TOLERANCE = 2e-3  # relative difference of cost that does not justify planning more often


class Growth(NamedTuple):
    """How a batch's needs follow from its token counts."""

    num_tokens: Ints  # [R] n_r at the start of the window
    chunk_blocks: Ints  # [R] of the running prefill chunk
    restore_blocks: Floats  # [R] staging kept until this placement's layers are back
    group_layers: Floats  # [G] layers per group
    layer_base_s: float  # compute of one layer, but for the context
    layer_s_per_context_token: float
    block_size: int  # tokens
    block_bytes: int
    bytes_per_s: float  # host to GPU
    copy_overhead_s: float
    chunk_bytes: int


class Promises(NamedTuple):
    """What readers expect: see `services.placement.slo.Promise`."""

    interval_s: Floats  # [P]
    slack_s: Floats  # [P]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Course:
    """A placement's next H steps."""

    steps_s: Floats  # [H] length, without the time outside the layers
    blocks: Floats  # [H] pool blocks during the step
    late: Ints  # [H] SLO violations in the step


@compiled
def transfer_s(growth: Growth, num_blocks: int) -> float:
    num_bytes = float(num_blocks) * growth.block_bytes
    copies = np.ceil(num_bytes / growth.chunk_bytes)
    return num_bytes / growth.bytes_per_s + copies * growth.copy_overhead_s


@compiled
def _pool_blocks(choice: Ints, board: kernels.Board, growth: Growth, step: int) -> float:
    """Return the pool blocks after step `step`, by the formula of `capacity`."""
    tables, size = board.tables, growth.block_size
    groups = tables.offloaded.shape[1]
    total, peak = 0.0, np.zeros(groups)
    for r in range(choice.shape[0]):
        after = growth.num_tokens[r] + step + 1
        full, partial = after // size, int(after % size > 0)
        offloaded, buffers = tables.num_jobs[choice[r]], tables.buffers[choice[r]]
        total += (groups - offloaded) * (full + partial)
        if board.instance.eq1:
            for layer in range(groups):
                peak[layer] += (full + partial) * tables.offloaded[choice[r], layer]
            continue
        sealing = int(full > max(growth.num_tokens[r] - SEALING_STEPS, 0) // size)
        total += buffers * full + growth.restore_blocks[r]
        total += offloaded * (partial + sealing + growth.chunk_blocks[r])
    return total + peak.max()


@compiled
def steps_of(
    choice: Ints, board: kernels.Board, growth: Growth, steps_s: Floats, blocks: Floats
) -> None:
    """Fill length and pool blocks of each step."""
    load = kernels.new_load(board.tables.num_jobs.shape[0], growth.group_layers.shape[0])
    for step in range(steps_s.shape[0]):
        load.mass[:] = 0.0
        context = 0
        for r in range(choice.shape[0]):
            tokens = growth.num_tokens[r] + step
            context += tokens
            load.mass[choice[r]] += transfer_s(growth, tokens // growth.block_size)
        layer_s = growth.layer_base_s + growth.layer_s_per_context_token * context
        board.instance.compute_s[:] = layer_s * growth.group_layers
        steps_s[step] = kernels.step_s(load, board)
        blocks[step] = _pool_blocks(choice, board, growth, step)


@compiled
def late_tokens(promises: Promises, steps_s: Floats, outside_s: float, late: Ints) -> None:
    """Fill the number of late tokens of each step: `services.placement.slo.late_tokens`."""
    due_s = promises.interval_s + promises.slack_s
    now_s = 0.0
    for step in range(steps_s.shape[0]):
        now_s += steps_s[step] + outside_s
        late[step] = 0
        for p in range(due_s.shape[0]):
            late[step] += int(now_s > due_s[p])
            due_s[p] = max(now_s, due_s[p]) + promises.interval_s[p]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How long a placement holds, and how long it is best held."""

    window: int  # Delta; 0: not even the first window fits the pool
    keeps_slo: bool
    first_step_s: float
    mean_step_s: float  # over the window
    cost_s: float  # mean_step_s + switching / window
    expires_after: int  # steps until the first capacity or SLO breach, within the horizon


def fit_window(
    course: Course,
    windows: list[int],
    *,
    capacity: float,
    late_per_step: float,
    switch_s: float,
) -> Fit:
    """Choose Delta from `windows` (ascending): least mean step + switching cost per step.

    Of windows that cost practically the same the longest, so that a calm batch is planned rarely.
    Windows that keep the SLO come first; among the others the same rule decides.
    """
    horizon = len(course.steps_s)
    over = np.flatnonzero(course.blocks > capacity * kernels.ROOM)
    num_fitting = int(over[0]) if len(over) else horizon
    steps = np.arange(1, horizon + 1)
    mean_s = np.cumsum(course.steps_s) / steps
    late = np.cumsum(course.late) / steps
    options = [
        (
            bool(late[window - 1] > late_per_step + 1e-9),
            mean_s[window - 1] + switch_s / window,
            window,
        )
        for window in windows
        if window <= num_fitting
    ]
    if not options:
        return Fit(
            window=0,
            keeps_slo=False,
            first_step_s=0.0,
            mean_step_s=0.0,
            cost_s=np.inf,
            expires_after=num_fitting,
        )
    misses, least_s, _ = min(options)
    window, cost_s = max(
        (window, float(cost_s))
        for missing, cost_s, window in options
        if missing == misses and cost_s <= least_s * (1.0 + WINDOW_TOLERANCE)
    )
    broken = np.flatnonzero(late[window - 1 :] > late_per_step + 1e-9)
    lasting = window - 1 + int(broken[0]) if len(broken) and not misses else num_fitting
    return Fit(
        window=window,
        keeps_slo=not misses,
        first_step_s=float(course.steps_s[0]),
        mean_step_s=float(mean_s[window - 1]),
        cost_s=cost_s,
        expires_after=min(num_fitting, lasting),
    )
