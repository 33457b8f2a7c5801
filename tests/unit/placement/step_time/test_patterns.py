"""Which offload patterns exist."""

from itertools import pairwise

import pytest

from services.placement.step_time.patterns import (
    RESIDENT,
    Pattern,
    PatternSpace,
    balanced_layers,
    even_distances,
    pattern_space,
)


@pytest.mark.parametrize(("num_layers", "expected"), [(32, 9), (40, 10), (80, 15)])
def test_distances_above_one_are_the_papers_count(num_layers, expected) -> None:
    # OrbitFlow, section 3.3.2: D(32) = 9.
    assert len([k for k in even_distances(num_layers) if k > 1]) == expected
    assert expected == len({num_layers // k for k in range(2, num_layers + 1)})


def test_of_equal_counts_the_largest_distance_is_kept() -> None:
    # 9 layers: distances 5 to 9 offload one layer each, 4 offloads two, 3 three, 2 four, 1 nine.
    assert even_distances(9) == (1, 2, 3, 4, 9)


@pytest.mark.parametrize("num_layers", [1, 2, 9, 32, 80])
@pytest.mark.parametrize("space", PatternSpace)
def test_a_space_holds_nothing_everything_and_no_pattern_twice(num_layers, space) -> None:
    patterns = pattern_space(num_layers, space)

    assert patterns[0] == RESIDENT
    assert Pattern(tuple(range(num_layers)), 1) in patterns
    assert len(set(patterns)) == len(patterns)
    assert all(p.num_buffers <= p.num_offloaded for p in patterns)


def test_the_full_space_adds_to_the_papers_and_never_replaces_it() -> None:
    even, full = (pattern_space(9, space) for space in (PatternSpace.EVEN, PatternSpace.FULL))

    assert set(even) < set(full)
    # Distance 4 gives layers {4, 8}; two balanced layers of nine are {5, 9}. Both are there.
    assert {Pattern((3, 7), 1), Pattern((4, 8), 1), Pattern((3, 7), 2)} <= set(full)


@pytest.mark.parametrize("num_layers", [5, 32, 80])
def test_balanced_gaps_differ_by_at_most_one(num_layers) -> None:
    for count in range(1, num_layers + 1):
        layers = (-1, *balanced_layers(num_layers, count))
        gaps = {b - a for a, b in pairwise(layers)}
        assert len(layers) == count + 1
        assert max(gaps) - min(gaps) <= 1
        assert layers[-1] == num_layers - 1
