"""How long a step would take: everything resident, a link that carries nothing, one in between."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.placement.run import step_estimate
from services.placement.run.step_estimate import Steps, compute_s, decode_s
from services.placement.run.types import RunSnapshot
from services.placement.step_time.latency import Fetch, step_timing
from services.placement.step_time.patterns import balanced_layers, make_pattern
from tests.unit.placement.run.snapshots import COSTS, make_snapshot, runs, snapshots

BATCH = [runs("a", 800), runs("b", 800), runs("c", 800)]  # 51 rows each of 98


def test_a_batch_that_fits_takes_its_compute() -> None:
    snapshot = make_snapshot(*BATCH, h2d_bytes_per_s=0.0)

    assert decode_s(snapshot, BATCH[:1]) == compute_s(COSTS, BATCH[:1]) == pytest.approx(0.021)


def test_without_a_link_a_batch_beyond_the_pool_never_ends() -> None:
    assert decode_s(make_snapshot(*BATCH, h2d_bytes_per_s=0.0), BATCH) == math.inf


def test_with_a_link_without_end_the_pool_has_none() -> None:
    snapshot = make_snapshot(*BATCH, h2d_bytes_per_s=1e15)

    assert decode_s(snapshot, BATCH) == pytest.approx(compute_s(COSTS, BATCH), rel=1e-6)


def test_a_batch_that_not_even_the_host_can_serve_never_ends() -> None:
    # A staging buffer each of 50 rows, 30 times: beyond the pool whatever leaves.
    batch = [runs(f"r{n}", 800) for n in range(30)]

    assert decode_s(make_snapshot(*batch), batch) == math.inf


@pytest.mark.parametrize("rate", [1e5, 1e6, 1e7])
def test_a_slow_link_is_waited_for_and_a_faster_one_less(rate: float) -> None:
    slow = decode_s(make_snapshot(*BATCH, h2d_bytes_per_s=rate), BATCH)
    fast = decode_s(make_snapshot(*BATCH, h2d_bytes_per_s=2 * rate), BATCH)

    assert compute_s(COSTS, BATCH) <= fast <= slow < math.inf


def test_a_step_later_is_no_shorter() -> None:
    snapshot = make_snapshot(*BATCH)

    assert decode_s(snapshot, BATCH, growth=48) >= decode_s(snapshot, BATCH)


@given(snapshots(), st.sampled_from([0.021, 0.03, 0.1, 1.0]))
def test_within_a_limit_a_step_is_as_long_as_without_one(
    snapshot: RunSnapshot, limit_s: float
) -> None:
    steps, step_s = Steps(snapshot), decode_s(snapshot, snapshot.requests)

    limited_s = steps.decode_s(snapshot.requests, growth=0, limit_s=limit_s)

    assert limited_s == step_s if step_s <= limit_s else limited_s > limit_s
    assert steps.decode_s(snapshot.requests, growth=0) == step_s


@given(snapshots(largest=600))
def test_no_number_of_givers_is_left_out_that_makes_the_step_shorter(snapshot: RunSnapshot) -> None:
    def alone_s(number: int) -> float:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(step_estimate, "TRIED", (number,))
            return decode_s(snapshot, snapshot.requests)

    every_s = [alone_s(number) for number in step_estimate.TRIED]

    assert decode_s(snapshot, snapshot.requests) == pytest.approx(min(every_s))


@given(
    st.floats(1e-6, 0.01),
    st.integers(1, 40),
    st.dictionaries(st.integers(1, 40), st.floats(0.0, 0.05), max_size=4),
)
def test_layers_alike_take_what_the_planners_formula_says(
    group_s: float, num_groups: int, copies: dict[int, float]
) -> None:
    copies = {number: copy_s for number, copy_s in copies.items() if number <= num_groups}
    fetches = [
        Fetch(pattern=make_pattern(balanced_layers(num_groups, number), 1), layer_s=copy_s)
        for number, copy_s in copies.items()
    ]

    layers_s = step_estimate._layers_s(group_s, num_groups, tuple(copies), [*copies.values()])

    assert layers_s == pytest.approx(step_timing([group_s] * num_groups, fetches).total_s)
