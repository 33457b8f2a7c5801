"""A placement over the coming decode steps: contexts grow, the placement stays (section 3.3.1).

Step t of the window (from 0) reads the KV of n_r + t a_r tokens and leaves n_r + (t + 1) a_r
behind, a_r being what a step brings: 1 without drafts.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.planner.solver.jit import compiled
from services.planner.solver.kernels.load import ROOM, Board, new_load
from services.planner.solver.kernels.step import step_s
from services.planner.solver.library import Floats, Ints

WINDOW_TOLERANCE = 2e-3  # relative difference of cost that does not justify planning more often


class BatchGrowth(NamedTuple):
    """How a batch's needs follow from its token counts."""

    num_tokens: Ints  # [R] that have to fit at the start of the window, a prompt in full
    num_read: Ints  # [R] whose KV the first step reads
    num_left: Ints  # [R] of a prompt that are not computed yet
    chunk: Ints  # [R] of a prompt that a step computes
    num_shared: Ints  # [R] of prefixes that the request begins with
    grows: Ints  # [R] 1: a request; 0: a prefix, which has no token more in any step
    per_step: Floats  # [R] tokens that a decode step adds, mean; 0: a prefix
    chunk_blocks: Ints  # [R] of the running prefill chunk
    passing_blocks: Floats  # [R] held until this placement's layers are back, or on the host
    group_layers: Floats  # [G] layers per group
    layer_base_s: float  # compute of one layer, whatever the step
    layer_s_per_token: float
    layer_s_per_context_token: float
    chunk_layer_s_per_token: float  # 0: a chunk costs what its tokens and its reads cost
    block_size: int  # tokens
    ahead: int  # tokens of a request that have room behind its own: drafts
    sealing_tokens: int  # see `services.placement.step_time.batch`
    block_bytes: int
    bytes_per_s: float  # host to GPU
    copy_overhead_s: float
    chunk_bytes: int


class Promises(NamedTuple):
    """What readers expect: see `services.placement.judging.slo.Promise`."""

    interval_s: Floats  # [P]
    slack_s: Floats  # [P]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Course:
    """A placement's next H steps."""

    steps_s: Floats  # [H] length, without the time outside the layers
    blocks: Floats  # [H] pool blocks during the step
    late: Ints  # [H] SLO violations in the step


@compiled
def transfer_s(growth: BatchGrowth, num_blocks: int) -> float:
    num_bytes = float(num_blocks) * growth.block_bytes
    copies = np.ceil(num_bytes / growth.chunk_bytes)
    return num_bytes / growth.bytes_per_s + copies * growth.copy_overhead_s


@compiled
def _pool_blocks(choice: Ints, board: Board, growth: BatchGrowth, step: int) -> float:
    """Return the pool blocks after step `step`, by the formula of `capacity`."""
    tables, size = board.tables, growth.block_size
    groups = tables.offloaded.shape[1]
    total = 0.0
    for r in range(choice.shape[0]):
        after = growth.num_tokens[r] + int(np.ceil((step + 1) * growth.per_step[r]))
        full = after // size
        partial = (after + growth.ahead * growth.grows[r] + size - 1) // size - full
        offloaded, buffers = tables.num_jobs[choice[r]], tables.buffers[choice[r]]
        total += (groups - offloaded) * (full + partial)
        sealing = int(full > max(growth.num_tokens[r] - growth.sealing_tokens, 0) // size)
        sealing *= growth.grows[r]
        total += buffers * full + growth.passing_blocks[r]
        total += offloaded * (partial + sealing + growth.chunk_blocks[r])
    return total


@compiled
def _reads_at(growth: BatchGrowth, request: int, step: int) -> tuple[int, float]:
    """Return (tokens whose KV is read for a row, what it adds to a layer's time): `prefill`."""
    read, left, chunk = growth.num_read[request], growth.num_left[request], growth.chunk[request]
    shared = growth.num_shared[request]
    if growth.grows[request] == 0:
        return read, 0.0
    if left > 0 and chunk == 0:
        return 0, 0.0
    num_chunk_steps = (left + chunk - 1) // chunk if left > 0 else 0
    if step >= num_chunk_steps:
        decoded = int(np.ceil((step - num_chunk_steps) * growth.per_step[request]))
        tokens = read + left + decoded
        reads_s = (tokens + shared) * growth.layer_s_per_context_token
        return tokens, growth.layer_s_per_token + reads_s
    tokens = read + step * chunk
    if growth.chunk_layer_s_per_token > 0.0:
        return tokens, chunk * growth.chunk_layer_s_per_token
    reads_s = (tokens + shared) * growth.layer_s_per_context_token
    return tokens, chunk * growth.layer_s_per_token + reads_s


@compiled
def steps_of(
    choice: Ints, board: Board, growth: BatchGrowth, steps_s: Floats, blocks: Floats
) -> None:
    """Fill length and pool blocks of each step."""
    load = new_load(board.tables.num_jobs.shape[0], growth.group_layers.shape[0])
    for step in range(steps_s.shape[0]):
        load.mass[:] = 0.0
        layer_s = growth.layer_base_s
        for r in range(choice.shape[0]):
            tokens, request_s = _reads_at(growth, r, step)
            layer_s += request_s
            load.mass[choice[r]] += transfer_s(growth, tokens // growth.block_size)
        board.instance.compute_s[:] = layer_s * growth.group_layers
        steps_s[step] = step_s(load, board)
        blocks[step] = _pool_blocks(choice, board, growth, step)


@compiled
def late_tokens(promises: Promises, steps_s: Floats, outside_s: float, late: Ints) -> None:
    """Fill the number of late tokens of each step: `services.placement.judging.slo.late_tokens`."""
    due_s = promises.interval_s + promises.slack_s
    now_s = 0.0
    for step in range(steps_s.shape[0]):
        now_s += steps_s[step] + outside_s
        late[step] = 0
        for p in range(due_s.shape[0]):
            late[step] += int(now_s > due_s[p])
            due_s[p] = max(now_s, due_s[p]) + promises.interval_s[p]


@compiled
def num_late(promises: Promises, step_s: float, window: int) -> int:
    """Return the late tokens of `window` steps of `step_s`: the sum of `slo.Promise.num_late`."""
    late = 0
    for p in range(promises.interval_s.shape[0]):
        interval_s, slack_s = promises.interval_s[p], promises.slack_s[p]
        if step_s > interval_s:
            late += window - int(min(np.floor(slack_s / (step_s - interval_s)), float(window)))
    return late


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
    num_fitting = _first_true(course.blocks > capacity * ROOM)
    fitting = [window for window in windows if window <= num_fitting]
    if not fitting:
        return _no_fit(num_fitting)
    steps = np.arange(1, len(course.steps_s) + 1)
    mean_s = np.cumsum(course.steps_s) / steps
    broken = np.cumsum(course.late) / steps > late_per_step + 1e-9
    misses = bool(broken[np.array(fitting) - 1].all())
    cost_s = {w: float(mean_s[w - 1]) + switch_s / w for w in fitting if broken[w - 1] == misses}
    window = max(w for w in cost_s if cost_s[w] <= min(cost_s.values()) * (1.0 + WINDOW_TOLERANCE))
    lasting = num_fitting if misses else window - 1 + _first_true(broken[window - 1 :])
    return Fit(
        window=window,
        keeps_slo=not misses,
        first_step_s=float(course.steps_s[0]),
        mean_step_s=float(mean_s[window - 1]),
        cost_s=cost_s[window],
        expires_after=min(num_fitting, lasting),
    )


def _first_true(flags: NDArray[np.bool_]) -> int:
    """Return the index of the first one, the length where there is none."""
    return int(flags.argmax()) if flags.any() else len(flags)


def _no_fit(num_fitting: int) -> Fit:
    return Fit(
        window=0,
        keeps_slo=False,
        first_step_s=0.0,
        mean_step_s=0.0,
        cost_s=math.inf,
        expires_after=num_fitting,
    )
