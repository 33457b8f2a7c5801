"""One placement problem in numbers: choose a pattern for each request.

    minimise  T(x) + sum_r penalty[r, x_r]
    subject to  sum_r use[r, x_r] <= capacity

T is the length of a decode step without the time outside the layers.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from services.planner.solver.library import Floats, Ints, PatternLibrary

TIE_BREAK = 1e-7  # of the transfer time: among equally fast placements, the fewest copies

# A forbidden pattern needs this much of the pool: more than any pool has, and still a number.
FORBIDDEN = 1e18


class Instance(NamedTuple):
    """What the kernels read of one problem. R requests, K patterns, L layer groups."""

    transfer_s: Floats  # [R] tau_r = b_r / B: one layer of the request over the link
    use: Floats  # [R, K] pool blocks under each pattern; FORBIDDEN where not allowed
    penalty_s: Floats  # [R, K] separable cost: switching per step, tie-break
    compute_s: Floats  # [L] comp_l
    capacity: float  # blocks
    share_blocks: float  # blocks that the relaxation counts in units of U_k
    fixed_blocks: float  # blocks needed under every pattern: open ones

    @property
    def num_requests(self) -> int:
        return int(self.transfer_s.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """What each request weighs, without regard to patterns."""

    transfer_s: Floats  # [R]
    full_blocks: Floats  # [R] per group: in host memory when offloaded
    resident_blocks: Floats  # [R] per group when resident
    offloaded_blocks: Floats  # [R] per group that stay in the pool when offloaded


def make_instance(
    library: PatternLibrary,
    weights: Weights,
    *,
    compute_s: Floats,
    capacity: float,
) -> Instance:
    """Return the instance in which every pattern is allowed and nothing is paid for switching."""
    tables, groups = library.tables, library.num_groups
    offloaded = tables.num_jobs.astype(np.float64)
    open_blocks = weights.resident_blocks - weights.full_blocks
    use = np.outer(weights.resident_blocks, groups - offloaded)
    use += np.outer(weights.full_blocks, tables.buffers) + np.outer(
        weights.offloaded_blocks, offloaded
    )
    return Instance(
        transfer_s=weights.transfer_s,
        use=use,
        penalty_s=TIE_BREAK * np.outer(weights.transfer_s, offloaded),
        compute_s=compute_s,
        capacity=float(capacity),
        share_blocks=float(weights.full_blocks.sum()),
        fixed_blocks=groups * float(open_blocks.sum()),
    )


def pool_blocks(instance: Instance, choice: Ints) -> float:
    """Return the pool blocks of a choice, exactly."""
    return float(instance.use[np.arange(instance.num_requests), choice].sum())


def penalty_s(instance: Instance, choice: Ints) -> float:
    return float(instance.penalty_s[np.arange(instance.num_requests), choice].sum())
