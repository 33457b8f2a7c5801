"""Seeded placement problems that are small enough to enumerate."""

import numpy as np

from services.planner.solver.instance import Instance, Weights, make_instance
from services.planner.solver.library import PatternLibrary


def small_instance(
    random: np.random.Generator,
    library: PatternLibrary,
    num_requests: int,
) -> Instance:
    """Return a problem with few sizes, so that ties occur, and any capacity, so that some fail."""
    full = random.integers(1, 7, num_requests).astype(np.float64)
    open_ = random.integers(0, 2, num_requests).astype(np.float64)
    extra = random.integers(0, 2, num_requests)
    weights = Weights(
        transfer_s=full * float(random.choice([0.5, 1.0])),
        full_blocks=full,
        resident_blocks=full + open_,
        offloaded_blocks=open_ + extra,
    )
    groups = library.num_groups
    compute_s = random.integers(1, 5, groups) * float(random.choice([0.5, 1.0, 3.0]))
    capacity = np.floor(random.uniform(0.05, 1.1) * groups * float((full + open_).sum()))
    return make_instance(library, weights, compute_s=compute_s, capacity=float(capacity))
