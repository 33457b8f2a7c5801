"""`dynamic-heuristic`: a hand-computed table, and properties on small inputs."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.placement.blocks import (
    BlockGeometry,
    Residency,
    min_request_blocks,
    num_request_blocks,
)
from services.placement.place.fewest_offloaded import Claim, fewest_offloaded, spread_order

FOUR_GROUPS = BlockGeometry(num_groups=4, block_size=10)


def demand(num_tokens: int, *, offloadable: bool = True, min_offloaded: int = 0) -> Claim:
    return Claim(num_tokens=num_tokens, offloadable=offloadable, min_offloaded=min_offloaded)


def offloaded(demands: list[Claim], num_blocks: int, max_staging: int = 1) -> list[int | None]:
    answers = fewest_offloaded(demands, FOUR_GROUPS, num_blocks=num_blocks, max_staging=max_staging)
    return [answer and answer.num_offloaded for answer in answers]


# 100 tokens: 40 blocks resident; k offloaded with one buffer: (4 - k) * 10 + 10.
@pytest.mark.parametrize(
    ("num_blocks", "expected"),
    [
        pytest.param(80, [0, 0], id="both-fit"),
        pytest.param(79, [0, 2], id="one-offloaded-group-frees-nothing"),  # 40 + 30
        pytest.param(69, [0, 3], id="the-later-one-gives-more"),  # 40 + 20
        pytest.param(50, [0, 4], id="the-later-one-gives-all"),  # 40 + 10
        pytest.param(49, [2, 4], id="then-the-earlier-one"),  # 30 + 10
        pytest.param(20, [4, 4], id="both-give-all"),
        pytest.param(19, [4, None], id="one-does-not-fit"),
    ],
)
def test_the_oldest_request_is_the_last_to_be_offloaded(
    num_blocks: int, expected: list[int | None]
) -> None:
    assert offloaded([demand(100), demand(100)], num_blocks) == expected


@pytest.mark.parametrize(
    ("num_blocks", "expected"),
    [(92, [0, 0]), (91, [0, 2]), (62, [0, 4]), (61, [2, 4]), (32, [4, 4]), (31, [3, None])],
)
def test_what_never_leaves_counts_at_every_placement(
    num_blocks: int, expected: list[int | None]
) -> None:
    """The table above, and 6 blocks more of each."""
    beside = replace(demand(100), num_side_blocks=6)

    assert offloaded([beside, beside], num_blocks) == expected


def test_two_buffers_are_used_while_they_cost_no_further_layer() -> None:
    # 2 offloaded: 2 * 10 resident + 2 * 10 staging = 40 = resident; 3 offloaded: 10 + 20 = 30.
    answers = fewest_offloaded([demand(100)], FOUR_GROUPS, num_blocks=39, max_staging=2)

    assert answers == [Residency(num_offloaded=2, num_staging=1)]  # 20 + 10 = 30 fits


def test_a_request_without_room_on_the_host_stays_resident() -> None:
    assert offloaded([demand(100, offloadable=False), demand(100)], 50) == [0, 4]
    assert offloaded([demand(100), demand(100, offloadable=False)], 50) == [4, 0]
    assert offloaded([demand(100, offloadable=False)], 39) == [None]


def test_a_given_placement_is_a_floor() -> None:
    assert offloaded([demand(100, min_offloaded=3)], 80) == [3]


def test_a_request_that_does_not_fit_leaves_room_for_a_smaller_one() -> None:
    assert offloaded([demand(1_000), demand(20)], 30) == [None, 0]


demands_strategy = st.lists(
    st.builds(
        Claim,
        num_tokens=st.integers(1, 60),
        offloadable=st.booleans(),
        min_offloaded=st.just(0),
    ),
    max_size=4,
)


@given(demands=demands_strategy, num_blocks=st.integers(0, 60), max_staging=st.integers(1, 2))
def test_answers_fit_and_no_request_could_keep_more_with_the_later_ones_at_their_minimum(
    demands: list[Claim], num_blocks: int, max_staging: int
) -> None:
    answers = fewest_offloaded(demands, FOUR_GROUPS, num_blocks=num_blocks, max_staging=max_staging)

    used = [
        num_request_blocks(FOUR_GROUPS, answer, num_tokens=demand.num_tokens) if answer else 0
        for demand, answer in zip(demands, answers, strict=True)
    ]
    assert sum(used) <= num_blocks
    later = [
        min_request_blocks(FOUR_GROUPS, num_tokens=d.num_tokens) if d.offloadable else u
        for d, u in zip(demands, used, strict=True)
    ]
    for i, (wanted, answer) in enumerate(zip(demands, answers, strict=True)):
        if answer is None or answer.num_offloaded == 0:
            continue
        promised = sum(later[j] for j in range(i + 1, len(demands)) if answers[j])
        for fewer, staging in itertools.product(range(answer.num_offloaded), (1, 2)):
            residency = Residency(num_offloaded=fewer, num_staging=min(staging, max_staging))
            blocks = num_request_blocks(FOUR_GROUPS, residency, num_tokens=wanted.num_tokens)
            assert sum(used[:i]) + blocks + promised > num_blocks


@pytest.mark.parametrize("num_groups", [1, 2, 3, 8, 32, 33])
def test_groups_leave_evenly_spaced_at_every_count(num_groups: int) -> None:
    order = spread_order(num_groups)

    assert sorted(order) == list(range(num_groups))
    for count in range(1, num_groups + 1):
        chosen = sorted(order[:count])
        gaps = [
            (b - a) % num_groups or num_groups
            for a, b in zip(chosen, [*chosen[1:], chosen[0]], strict=True)
        ]
        assert max(gaps) <= 2 * -(-num_groups // count)


def test_the_first_group_leaves_last_for_nothing_computes_before_it() -> None:
    assert spread_order(8)[-1] == 0
