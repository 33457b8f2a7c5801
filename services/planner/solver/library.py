"""A pattern space as tables, for linear programs and search kernels. Built once per engine shape.

Layers count from 0; "after i" means at the end of i layers. K patterns, L layer groups, J jobs.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from services.placement.step_time.latency import Fetch, jobs_of
from services.placement.step_time.patterns import Pattern, PatternSpace, pattern_space

Floats: TypeAlias = NDArray[np.floating[Any]]
Ints: TypeAlias = NDArray[np.int64]


MAX_COMPARISONS = 1_500_000_000  # about a second


class Tables(NamedTuple):
    """What the kernels read."""

    first: Ints  # [K, 2] layers whose copies are released at the start of the step, -1: none
    release: Ints  # [K, L] layer whose copy is released at the end of layer l, -1: none
    job_release: Ints  # [K, J] number of layers after which a copy is released
    job_needed: Ints  # [K, J] layer that needs it, counted from 1
    num_jobs: Ints  # [K] = n_k, number of offloaded layers
    demand: NDArray[np.float32]  # [L+1, L+1, K] d_k(i, l): copies released after i, needed by l
    offloaded: Floats  # [K, L] 1 where the layer is offloaded
    dominates: NDArray[
        np.bool_
    ]  # [K, K] whether the second demands as much as the first everywhere
    weight: Floats  # [K] total demand: the first of a dominating pair has not more
    units: Floats  # [K] U_k = L - n_k + min(m, n_k): layers' worth of blocks in the pool
    buffers: Ints  # [K] prefetch buffers


@dataclass(frozen=True, slots=True, eq=False)
class PatternLibrary:
    patterns: tuple[Pattern, ...]
    num_groups: int
    tables: Tables
    index: dict[Pattern, int]
    even: Ints  # columns of the paper's space, in its own order: one buffer, and nothing
    extra: Ints  # columns beyond the space: see `extended_library`

    @property
    def num_patterns(self) -> int:
        return len(self.patterns)


@lru_cache(maxsize=8)
def pattern_library(num_groups: int, space: PatternSpace) -> PatternLibrary:
    """Return the tables of a space; the same object for the same arguments."""
    patterns = pattern_space(num_groups, space)
    even = pattern_space(num_groups, PatternSpace.EVEN)
    index = {pattern: k for k, pattern in enumerate(patterns)}
    return PatternLibrary(
        patterns=patterns,
        num_groups=num_groups,
        tables=_tables(patterns, num_groups),
        index=index,
        even=np.array([index[pattern] for pattern in even], dtype=np.int64),
        extra=np.zeros(0, dtype=np.int64),
    )


@lru_cache(maxsize=16)
def extended_library(
    num_groups: int, space: PatternSpace, extra: tuple[Pattern, ...]
) -> PatternLibrary:
    """Return a space's library with more columns: patterns that only some requests need.

    `extra` holds distinct patterns that the space lacks. They dominate nothing.
    """
    base = pattern_library(num_groups, space)
    if not extra:
        return base
    patterns, added = base.patterns + extra, _tables(extra, num_groups)
    joined = {
        name: np.concatenate([getattr(base.tables, name), getattr(added, name)], axis=axis)
        for name, axis in ((n, 2 if n == "demand" else 0) for n in Tables._fields)
        if name != "dominates"
    }
    dominates = np.eye(len(patterns), dtype=np.bool_)
    dominates[: base.num_patterns, : base.num_patterns] = base.tables.dominates
    return PatternLibrary(
        patterns=patterns,
        num_groups=num_groups,
        tables=Tables(**joined, dominates=dominates),
        index={pattern: k for k, pattern in enumerate(patterns)},
        even=base.even,
        extra=np.arange(base.num_patterns, len(patterns), dtype=np.int64),
    )


def _tables(patterns: tuple[Pattern, ...], num_groups: int) -> Tables:
    count = len(patterns)
    first = np.full((count, 2), -1, dtype=np.int64)
    release = np.full((count, num_groups), -1, dtype=np.int64)
    job_release = np.zeros((count, num_groups), dtype=np.int64)
    job_needed = np.zeros((count, num_groups), dtype=np.int64)
    jobs = np.zeros((count, num_groups + 1, num_groups + 1), dtype=np.float32)
    offloaded = np.zeros((count, num_groups))
    for k, pattern in enumerate(patterns):
        offloaded[k, list(pattern.offloaded)] = 1.0
        for j, job in enumerate(jobs_of(Fetch(pattern=pattern, layer_s=1.0))):
            job_release[k, j], job_needed[k, j] = job.release, job.needed
            jobs[k, job.release, job.needed] += 1.0
            if job.release == 0:
                first[k, j] = job.needed - 1
            else:
                release[k, job.release - 1] = job.needed - 1
    sums = jobs[:, ::-1].cumsum(axis=1)[:, ::-1].cumsum(axis=2)  # released after, needed before
    demand = np.ascontiguousarray(np.moveaxis(sums, 0, 2))
    num_jobs = np.array([pattern.num_offloaded for pattern in patterns], dtype=np.int64)
    buffers = np.array([pattern.num_buffers for pattern in patterns], dtype=np.int64)
    return Tables(
        first=first,
        release=release,
        job_release=job_release,
        job_needed=job_needed,
        num_jobs=num_jobs,
        demand=demand,
        offloaded=offloaded,
        dominates=_dominates(demand),
        weight=demand.sum(axis=(0, 1), dtype=np.float64),
        units=(num_groups - num_jobs + buffers).astype(np.float64),
        buffers=buffers,
    )


def _dominates(demand: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return for each pair whether the second pattern's step is never shorter than the first's.

    True for a pattern and itself. Beyond a hundred layers the comparison is left out.
    """
    count = demand.shape[2]
    if demand.size * count > MAX_COMPARISONS:
        return np.eye(count, dtype=np.bool_)
    return np.array([(demand >= demand[:, :, k, None]).all(axis=(0, 1)) for k in range(count)])
