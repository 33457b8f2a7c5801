"""The step latency model: OrbitFlow's Fig. 3, hand-computed cases, and both forms equal."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement.step_time.latency import Fetch, step_timing
from services.placement.step_time.patterns import RESIDENT, Pattern, PatternSpace, pattern_space
from tests.fuzz import examples
from tests.unit.placement.closed_forms import eq1_blocks, longest_path_s
from tests.unit.placement.other_readings import algorithm_1_s, equal_sharing_s

# Fig. 3: 9 layers, a pool of 70 blocks, 3 blocks copied in the time of one layer. In units of one
# block's copy a layer computes for 3. Layers in the figure count from 1.
POOL = 70
COMPUTE = [3.0] * 9
EVERY_THIRD = Pattern((2, 5, 8), 1)
PLACEMENTS = {
    "A": (EVERY_THIRD, EVERY_THIRD),
    "B": (RESIDENT, EVERY_THIRD),
    "C": (Pattern((3, 7), 1), EVERY_THIRD),
}


def stalls(name: str, r1_blocks: int) -> float | None:
    """Return the figure's stalls, None where the placement does not fit by Eq. 1."""
    r1, r2 = PLACEMENTS[name]
    if eq1_blocks(9, [(r1, r1_blocks), (r2, 6)]) > POOL:
        return None
    fetches = [Fetch(pattern=r1, layer_s=r1_blocks), Fetch(pattern=r2, layer_s=6)]
    return sum(step_timing(COMPUTE, fetches).stalls_s)


@pytest.mark.parametrize(
    ("name", "r1_blocks", "expected"),
    [("A", 3, 9), ("B", 3, 0), ("C", 3, 0), ("A", 4, 12), ("B", 4, None), ("C", 4, 2)],
)
def test_figure_3_of_orbitflow_holds(name, r1_blocks, expected) -> None:
    assert stalls(name, r1_blocks) == expected


def test_placement_b_misses_the_pool_by_the_figures_78_blocks() -> None:
    # R1 resident 9 * 4 = 36, R2 resident 6 * 6 = 36, buffer 6.
    assert eq1_blocks(9, [(RESIDENT, 4), (EVERY_THIRD, 6)]) == 78


@pytest.mark.parametrize(
    ("pattern", "layer_s", "expected"),
    [
        (RESIDENT, 5.0, (0, 0, 0, 0)),
        # Layer 1 has no compute to hide behind; layers 3 starts its copy when layer 1 has ended:
        # 5 of work, 3 hidden by layer 2.
        (Pattern((0, 2), 1), 5.0, (5, 0, 2, 0)),
        # With a second buffer layer 3's copy is in the queue from the start: 3 + 3 hidden.
        (Pattern((0, 2), 2), 5.0, (5, 0, 0, 0)),
        # Every layer, one buffer: each copy starts when the previous layer ends, all of it stalls.
        (Pattern((0, 1, 2, 3), 1), 5.0, (5, 5, 5, 5)),
        # Two buffers: each copy has one layer's compute to hide behind.
        (Pattern((0, 1, 2, 3), 2), 5.0, (5, 2, 2, 2)),
    ],
)
def test_one_request_stalls_as_computed_by_hand(pattern, layer_s, expected) -> None:
    timing = step_timing([3.0] * 4, [Fetch(pattern=pattern, layer_s=layer_s)])

    assert timing.stalls_s == expected
    assert timing.total_s == 12.0 + sum(expected)


def test_the_other_readings_differ_where_the_figure_does() -> None:
    fetches = [
        Fetch(pattern=PLACEMENTS["C"][0], layer_s=4),
        Fetch(pattern=EVERY_THIRD, layer_s=6),
    ]

    assert equal_sharing_s(COMPUTE, fetches) - 27 == pytest.approx(7)
    assert algorithm_1_s(COMPUTE, fetches) - 27 == pytest.approx(25)


def test_algorithm_1_as_printed_takes_an_all_offloaded_request_for_free() -> None:
    everything = Fetch(pattern=Pattern((0, 1, 2), 1), layer_s=10.0)

    assert algorithm_1_s([3.0] * 3, [everything]) == 9.0
    assert step_timing([3.0] * 3, [everything]).total_s == 39.0


COMPUTES = st.lists(st.floats(0.1, 4.0), min_size=1, max_size=10)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[float], list[Fetch]]:
    compute = draw(COMPUTES)
    patterns = st.sampled_from(pattern_space(len(compute), PatternSpace.FULL))
    fetch = st.builds(Fetch, pattern=patterns, layer_s=st.floats(0.0, 9.0))
    return compute, draw(st.lists(fetch, max_size=4))


@given(step=steps())
@settings(max_examples=examples(100))
def test_event_recursion_and_closed_form_are_equal(step) -> None:
    compute, fetches = step

    assert step_timing(compute, fetches).total_s == pytest.approx(longest_path_s(compute, fetches))


@given(step=steps())
@settings(max_examples=examples(100))
def test_no_way_to_share_the_link_beats_the_ordered_queue(step) -> None:
    compute, fetches = step
    one_buffer = [
        Fetch(
            pattern=Pattern(f.pattern.offloaded, min(1, f.pattern.num_buffers)), layer_s=f.layer_s
        )
        for f in fetches
    ]

    assert step_timing(compute, one_buffer).total_s <= equal_sharing_s(compute, one_buffer) + 1e-9
