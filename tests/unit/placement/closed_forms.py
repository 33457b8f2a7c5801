"""What the papers print and what follows from it, in closed form: the product computes the same."""

from collections.abc import Sequence

from services.placement.capacity import Demand, blocks_needed
from services.placement.step_time.latency import Fetch, jobs_of
from services.placement.step_time.patterns import Pattern


def blocks_while_restoring(demand: Demand, *, present: Pattern, target: Pattern) -> int:
    """Return the pool blocks of one request while it moves from `present` to `target`.

    A layer that comes back keeps its staging until its own blocks are filled, so a request whose
    buffers shrink needs the difference until then.
    """
    needed = blocks_needed(
        demand, num_offloaded=target.num_offloaded, num_buffers=target.num_buffers
    )
    comes_back = not set(present.offloaded) <= set(target.offloaded)
    spare = max(0, present.num_buffers - target.num_buffers)
    return needed + (spare * demand.num_full_blocks if comes_back else 0)


def eq1_blocks(num_groups: int, placed: Sequence[tuple[Pattern, int]]) -> int:
    """Return the blocks of OrbitFlow's Eq. 1 for (pattern, blocks per layer) of each request.

    Resident blocks plus one shared buffer, as large as the largest demand of any one layer.
    """
    resident = sum((num_groups - pattern.num_offloaded) * blocks for pattern, blocks in placed)
    buffer = max(
        sum(blocks for pattern, blocks in placed if layer in pattern.offloaded)
        for layer in range(num_groups)
    )
    return resident + buffer


def longest_path_s(compute_s: Sequence[float], fetches: Sequence[Fetch]) -> float:
    """Return the step's length by the closed form."""
    num_layers = len(compute_s)
    jobs = [job for fetch in fetches for job in jobs_of(fetch)]
    ends = [0.0]
    for layer in range(1, num_layers + 1):
        start = ends[layer - 1]
        for i in range(layer):
            demand = sum(job.work_s for job in jobs if job.release >= i and job.needed <= layer)
            if demand > 0.0:
                start = max(start, ends[i] + demand)
        ends.append(start + compute_s[layer - 1])
    return ends[-1]
