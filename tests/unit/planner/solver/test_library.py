"""Pattern tables: what the kernels take for granted."""

import numpy as np
import pytest

from services.placement.step_time.latency import Fetch, step_timing
from services.placement.step_time.patterns import PatternSpace, pattern_space
from services.planner.solver.library import pattern_library


@pytest.mark.parametrize("num_groups", [1, 2, 9, 32])
def test_even_columns_are_the_papers_space_in_its_own_order(num_groups) -> None:
    library = pattern_library(num_groups, PatternSpace.FULL)

    even = [library.patterns[column] for column in library.even]
    assert even == list(pattern_space(num_groups, PatternSpace.EVEN))


def test_a_dominated_pattern_is_never_faster() -> None:
    library, random = pattern_library(12, PatternSpace.FULL), np.random.default_rng(3)
    dominates = library.tables.dominates
    assert dominates.diagonal().all()
    assert dominates[0].all()  # nothing offloaded beats everything
    pairs = [(a, b) for a, b in np.argwhere(dominates) if a != b]
    for a, b in random.permutation(pairs)[:150]:
        compute = random.uniform(0.1, 3.0, 12).tolist()
        other = Fetch(pattern=library.patterns[random.integers(len(library.patterns))], layer_s=1.0)
        faster, slower = (
            step_timing(compute, [Fetch(pattern=library.patterns[k], layer_s=1.5), other]).total_s
            for k in (a, b)
        )
        assert faster <= slower + 1e-12


def test_demand_counts_copies_released_after_and_needed_by() -> None:
    library = pattern_library(9, PatternSpace.FULL)
    for k, pattern in enumerate(library.patterns):
        demand = library.tables.demand[:, :, k]
        assert demand[0, 9] == pattern.num_offloaded
        if pattern.num_buffers == 1 and pattern.offloaded == (3, 7):
            # Layer 4's copy starts at once, layer 8's at the end of layer 4.
            assert demand[0, 4] == 1
            assert demand[4, 8] == 1
            assert demand[5, 8] == 0
