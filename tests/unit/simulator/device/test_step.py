"""One step: OrbitFlow's Fig. 3, cases by hand, and bounds that hold for every step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement.step_time.latency import Fetch, step_timing
from services.placement.step_time.patterns import RESIDENT, Pattern
from simulator.device.copies import RESTORE, CopyJob, Lane
from simulator.device.step import NO_COSTS, CopyCosts, StagedRequest, StepRun, StepTimes, StepWork
from tests.fuzz import examples

# Fig. 3: 9 layers, 3 blocks copied in the time of one layer: one block's copy is the unit of time
# and of bytes, so that copies are as fine as the figure's.
COMPUTE = [3.0] * 9
EVERY_THIRD = (2, 5, 8)
PLACEMENTS = {
    "A": (EVERY_THIRD, EVERY_THIRD),
    "B": ((), EVERY_THIRD),
    "C": ((3, 7), EVERY_THIRD),
}


def run(
    compute_s: list[float],
    staged: list[StagedRequest],
    *,
    rate: float = 1.0,
    chunk: int = 1,
    overhead_s: float = 0.0,
    costs: CopyCosts = NO_COSTS,
) -> tuple[StepTimes, Lane]:
    lane = Lane(bytes_per_s=rate, chunk_bytes=chunk, copy_overhead_s=overhead_s)
    work = StepWork(compute_s=compute_s, outside_s=0.0, staged=staged)
    times = StepRun(work, lane, Lane(bytes_per_s=rate), costs).run(0.0)
    lane.check_integrity()
    return times, lane


def staged(offloaded: tuple[int, ...], num_bytes: int, num_buffers: int = 1) -> StagedRequest:
    return StagedRequest(offloaded=offloaded, num_buffers=num_buffers, group_bytes=num_bytes)


@pytest.mark.parametrize(
    ("name", "r1_blocks", "expected"),
    [("A", 3, 9), ("B", 3, 0), ("C", 3, 0), ("A", 4, 12), ("C", 4, 2)],
)
def test_figure_3_of_orbitflow_holds(name, r1_blocks, expected) -> None:
    # B at 4 blocks does not fit the figure's pool: nothing to simulate.
    r1, r2 = PLACEMENTS[name]

    times, _ = run(COMPUTE, [staged(r1, r1_blocks), staged(r2, 6)])

    assert sum(times.stalls_s) == expected
    assert times.end_s == 27 + expected


@pytest.mark.parametrize(
    ("offloaded", "num_buffers", "expected"),
    [
        # The first layer has no compute to hide behind.
        ((0,), 1, (5, 0, 0, 0)),
        # 3 of 5 hidden behind layer 0.
        ((1,), 1, (0, 2, 0, 0)),
        # Layer 2 starts its copy when layer 0 has ended: 3 of 5 hidden behind layer 1.
        ((0, 2), 1, (5, 0, 2, 0)),
        # With a second buffer its copy follows the first one at once: 6 of compute hide it.
        ((0, 2), 2, (5, 0, 0, 0)),
        # One buffer: each copy waits for the layer before, nothing is hidden.
        ((0, 1, 2, 3), 1, (5, 5, 5, 5)),
        # Two: each copy has one layer to hide behind.
        ((0, 1, 2, 3), 2, (5, 2, 2, 2)),
    ],
)
def test_one_request_stalls_as_computed_by_hand(offloaded, num_buffers, expected) -> None:
    times, _ = run([3.0] * 4, [staged(offloaded, 5, num_buffers)])

    assert times.stalls_s == expected
    assert times.end_s == 12 + sum(expected)


def test_each_copy_pays_its_overhead() -> None:
    # 10 bytes in chunks of 4 are three copies: 3 * 0.5 + 10 / 2 = 6.5 before layer 0.
    times, lane = run([1.0], [staged((0,), 10)], rate=2.0, chunk=4, overhead_s=0.5)

    assert times.stalls_s == (6.5,)
    assert lane.counts.num_copies == 3


def test_compute_is_slower_while_a_copy_runs_beside_it() -> None:
    # The copy for layer 1 takes 2 and is hidden: in these 2 layer 0 gets 2 / 1.25 = 1.6 done, and
    # its other 1.4 at full speed.
    times, _ = run([3.0, 3.0], [staged((1,), 2)], chunk=8, costs=CopyCosts(slowdown_frac=0.25))

    assert times.stalls_s == (0.0, 0.0)
    assert times.end_s == pytest.approx(2.0 + 1.4 + 3.0)


def test_an_urgent_copy_overtakes_a_restore_but_not_its_chunk_under_way() -> None:
    lane = Lane(bytes_per_s=1.0, chunk_bytes=4)
    restore = CopyJob(num_bytes=100, priority=(RESTORE, 0))
    lane.submit(restore, 0.0)
    lane.advance(1.0)  # its first chunk runs until 4

    work = StepWork(compute_s=[1.0, 1.0], outside_s=0.0, staged=[staged((0,), 2)])
    times = StepRun(work, lane, Lane(bytes_per_s=1.0), NO_COSTS).run(1.0)

    assert times.stalls_s == (5.0, 0.0)  # from 1 to 4, then 2 of its own
    assert restore.num_left_bytes == 96  # and a chunk that began at 6
    lane.check_integrity()


@st.composite
def steps(draw) -> tuple[list[float], list[StagedRequest]]:
    num_groups = draw(st.integers(1, 8))
    compute = [draw(st.integers(1, 5)) * 1.0 for _ in range(num_groups)]
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        groups = draw(st.sets(st.integers(0, num_groups - 1), min_size=1))
        buffers = draw(st.integers(1, min(2, len(groups))))
        requests.append(staged(tuple(sorted(groups)), draw(st.integers(1, 12)), buffers))
    return compute, requests


def test_who_submits_a_copy_computes_nothing_meanwhile() -> None:
    # 0.5 s for the first copy at the start, 0.5 s for the second after layer 1: the link has the
    # first one's 2 s beside the 3 s of layer 0, the second one's beside the 3 s of layer 2.
    times, _ = run([3.0] * 4, [staged((1, 3), 2)], costs=CopyCosts(submit_s=0.5))

    assert times.end_s == 4 * 3.0 + 2 * 0.5
    assert times.stalls_s == (0.0, 0.0, 0.0, 0.0)
    assert times.compute_s == 12.0 + 0.5  # the first is submitted before the layers
    assert times.num_loads == 2


def test_what_may_begin_at_once_for_one_layer_is_one_copy() -> None:
    # Submitting takes 0.5 s for each request; their 2 + 3 bytes are one copy of layer 1, whose
    # latency of 1 s counts once.
    lane = Lane(bytes_per_s=1.0, copy_overhead_s=1.0, chunk_bytes=100)
    work = StepWork(compute_s=[3.0, 3.0], outside_s=0.0, staged=[staged((1,), 2), staged((1,), 3)])
    times = StepRun(work, lane, Lane(bytes_per_s=1.0), CopyCosts(submit_s=0.5)).run(0.0)

    assert times.stalls_s == (0.0, 2.0)  # from 1 + 3 to 6
    assert times.num_loads == 2


def test_all_reduces_and_copies_wait_for_each_other_on_one_link() -> None:
    # Each layer has 3 s of compute and two all-reduces of 1 s. A copy of 8 bytes for layer 1 is
    # under way in chunks of 2 s when they come, at 1.5 and, after a chunk's end at 2, at 4.5 again.
    lane = Lane(bytes_per_s=1.0, chunk_bytes=2)
    work = StepWork(
        compute_s=[5.0, 5.0],
        outside_s=0.0,
        staged=[staged((1,), 8)],
        num_reduces=[2, 2],
        reduce_bytes=1,
    )
    times = StepRun(work, lane, Lane(bytes_per_s=1.0), NO_COSTS).run(0.0)

    # Layer 0: 1.5, until 2 and 3; 1.5, until 5 and 6. The copy: 2, then 3 to 5, then 6 to 10.
    assert times.stalls_s == (0.0, 4.0)
    assert times.end_s == 10.0 + 5.0
    assert times.reduced_bytes == 4
    assert lane.counts.carried_bytes == 8 + 4


def test_all_reduces_take_no_longer_where_nothing_is_copied() -> None:
    work = StepWork(compute_s=[5.0, 5.0], outside_s=1.0, num_reduces=[2, 2], reduce_bytes=1)
    lane = Lane(bytes_per_s=1.0)

    assert StepRun(work, lane, Lane(bytes_per_s=1.0), NO_COSTS).run(0.0).end_s == 11.0
    assert lane.counts.carried_bytes == 0


@pytest.mark.parametrize(("num_buffers", "stall_s"), [(1, 2.0), (2, 0.0)])
def test_a_chunk_waits_until_its_buffer_is_on_the_host(num_buffers, stall_s) -> None:
    # Each of 3 groups leaves 2 bytes in its buffer. With one buffer the next group waits for them;
    # with two they leave while the group between is computed, for 3 s.
    lane, d2h = Lane(bytes_per_s=1.0), Lane(bytes_per_s=1.0)
    filling = StagedRequest(
        offloaded=(0, 1, 2), num_buffers=num_buffers, group_bytes=0, filled_bytes=2
    )
    work = StepWork(compute_s=[3.0] * 3, outside_s=0.0, staged=[filling])
    times = StepRun(work, lane, d2h, NO_COSTS).run(0.0)

    assert times.stalls_s == (0.0, stall_s, stall_s)
    d2h.advance(100.0)
    assert d2h.counts.carried_bytes == 6
    assert lane.counts.carried_bytes == 0


@settings(max_examples=examples(100))
@given(steps(), st.integers(1, 16), st.sampled_from([0.0, 0.25]))
def test_no_step_is_shorter_than_its_compute_or_its_copies(step, chunk, slowdown) -> None:
    compute, requests = step
    times, lane = run(compute, requests, chunk=chunk, costs=CopyCosts(slowdown_frac=slowdown))
    num_bytes = sum(len(r.offloaded) * r.group_bytes for r in requests)

    assert lane.counts.carried_bytes == num_bytes
    assert times.end_s >= sum(compute) - 1e-9
    assert times.end_s >= num_bytes - 1e-9  # at one byte per second, all of it before some layer
    assert times.end_s <= (1 + slowdown) * sum(compute) + num_bytes + 1e-9


@settings(max_examples=examples(100))
@given(steps(), st.integers(1, 16))
def test_half_the_link_never_speeds_up_one_request(step, chunk) -> None:
    compute, requests = step
    full, _ = run(compute, requests[:1], rate=2.0, chunk=chunk)
    half, _ = run(compute, requests[:1], rate=1.0, chunk=chunk)

    assert half.end_s >= full.end_s - 1e-9


@settings(max_examples=examples(100))
@given(steps(), st.integers(1, 4))
def test_half_the_link_speeds_no_step_up_by_more_than_a_chunk_under_way(step, chunk) -> None:
    # A faster link may have begun a less urgent chunk when an urgent copy is released: each release
    # can wait for one chunk at most.
    compute, requests = step
    full, _ = run(compute, requests, rate=2.0, chunk=chunk)
    half, _ = run(compute, requests, rate=1.0, chunk=chunk)

    assert half.end_s >= full.end_s - chunk / 2.0 - 1e-9


@settings(max_examples=examples(100))
@given(steps())
def test_fine_chunks_come_close_to_the_planners_formula(step) -> None:
    # The formula is fluid: chunks of one byte differ from it by one byte's time per layer at most.
    compute, requests = step
    times, _ = run(compute, requests, chunk=1)
    fetches = [
        Fetch(pattern=Pattern(tuple(r.offloaded), r.num_buffers), layer_s=float(r.group_bytes))
        for r in requests
    ]
    fluid_s = step_timing(compute, fetches).total_s

    assert RESIDENT not in [fetch.pattern for fetch in fetches]
    assert fluid_s - 1e-9 <= times.end_s <= fluid_s + len(compute)


@given(compute=st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=40), start=st.floats(0, 1e4))
def test_a_step_without_copies_takes_the_same_time_to_the_bit_either_way(compute, start) -> None:
    nothing = StagedRequest(offloaded=(0,), num_buffers=1, group_bytes=0)
    ends = []
    for copied in ([], [nothing]):
        lane = Lane(bytes_per_s=1.0, chunk_bytes=1)
        work = StepWork(compute_s=compute, outside_s=0.1, staged=copied)
        ends.append((StepRun(work, lane, Lane(bytes_per_s=1.0), NO_COSTS).run(start), lane.now_s))

    assert ends[0] == ends[1]
