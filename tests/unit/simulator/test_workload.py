"""What arrives."""

import random
import statistics
from dataclasses import replace
from itertools import islice, repeat

import pytest

from simulator.workload import (
    Lengths,
    burst_gaps,
    constant_length,
    drawn_requests,
    gamma_gaps,
    published_lengths,
    with_leavers,
    with_less_urgent,
)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_their_mean_and_their_coefficient_of_variation(cv) -> None:
    gaps = list(islice(gamma_gaps(random.Random(0), rate_per_s=2.0, cv=cv), 40_000))

    assert statistics.fmean(gaps) == pytest.approx(0.5, rel=0.1)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.1)


def test_bursts_come_at_once_and_keep_the_rate() -> None:
    assert list(islice(burst_gaps(rate_per_s=2.0, size=3), 6)) == [0, 0, 1.5, 0, 0, 1.5]


def test_lengths_have_their_mean_and_median() -> None:
    lengths, rng = Lengths(mean=1_852, median=821), random.Random(0)
    drawn = [lengths.draw(rng) for _ in range(40_000)]

    assert statistics.fmean(drawn) == pytest.approx(1_852, rel=0.1)
    assert statistics.median(drawn) == pytest.approx(821, rel=0.05)


def test_lengths_stay_within_their_ends() -> None:
    prompts, outputs = published_lengths("orbitflow-b")
    rng = random.Random(0)

    assert max(prompts.draw(rng) for _ in range(5_000)) == 8_662
    assert min(outputs.draw(rng) for _ in range(5_000)) >= 1
    assert constant_length(77).draw(rng) == 77


def test_lengths_do_not_depend_on_how_requests_arrive() -> None:
    lengths = published_lengths("sharegpt")
    slow = drawn_requests(burst_gaps(rate_per_s=1, size=1), lengths, num_requests=9, seed=5)
    burst = drawn_requests(burst_gaps(rate_per_s=9, size=3), lengths, num_requests=9, seed=5)

    assert [r.num_prompt_tokens for r in slow] == [r.num_prompt_tokens for r in burst]
    assert [r.arrival_s for r in slow] != [r.arrival_s for r in burst]


def test_so_large_a_share_of_readers_leaves_wherever_in_the_answer() -> None:
    lengths = (constant_length(10), constant_length(100))
    stay = drawn_requests(burst_gaps(rate_per_s=1, size=1), lengths, num_requests=4_000, seed=5)
    few, many = (with_leavers(stay, frac, seed=5) for frac in (0.2, 0.5))
    points = [one.leaves_after for one in many if one.leaves_after is not None]

    assert len(points) == pytest.approx(2_000, rel=0.05)
    assert statistics.fmean(points) == pytest.approx(50.5, rel=0.05)
    assert (min(points), max(points)) == (1, 100)
    assert with_leavers(stay, 0.0, seed=5) == stay
    assert all(
        one.leaves_after in (None, other.leaves_after) for one, other in zip(few, many, strict=True)
    )


def test_a_share_of_requests_is_less_urgent_and_the_same_for_a_seed() -> None:
    asked = drawn_requests(
        repeat(1.0), (constant_length(8), constant_length(8)), num_requests=200, seed=1
    )
    half, again, other = (with_less_urgent(asked, 0.5, seed) for seed in (1, 1, 2))

    assert half == again != other
    assert 70 < sum(one.priority for one in half) < 130
    assert [one.priority for one in with_less_urgent(asked, 1.0, 1)] == [1] * 200
    assert [replace(one, priority=0) for one in half] == asked
