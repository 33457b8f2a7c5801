"""The block formula, by hand and against what it stands for."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.placement.blocks import (
    RESIDENT,
    STATE,
    BlockGeometry,
    Residency,
    max_tokens_in,
    min_request_blocks,
    num_request_blocks,
    side_blocks,
    side_copy_blocks,
    side_copy_positions,
)

EIGHT_GROUPS = BlockGeometry(num_groups=8, block_size=32)


@pytest.mark.parametrize(
    ("num_tokens", "num_offloaded", "num_staging", "expected"),
    [
        pytest.param(0, 0, 1, 0, id="nothing-yet"),
        pytest.param(640, 0, 1, 160, id="resident"),  # 8 * 20
        pytest.param(641, 0, 1, 168, id="resident-with-an-open-block"),  # 8 * 21
        pytest.param(640, 8, 1, 20, id="offloaded-full-blocks-only"),  # one buffer of 20
        pytest.param(641, 8, 1, 28, id="offloaded-with-open-blocks"),  # 20 + 8
        pytest.param(641, 8, 2, 48, id="two-buffers"),  # 2 * 20 + 8
        pytest.param(641, 4, 1, 108, id="half"),  # 4 * 21 + 20 + 4
        pytest.param(641, 1, 2, 168, id="one-group-cannot-use-two-buffers"),  # 7 * 21 + 20 + 1
        pytest.param(31, 8, 2, 8, id="less-than-a-block-needs-no-staging"),
    ],
)
def test_a_request_takes_what_is_resident_plus_staging_plus_open_blocks(
    num_tokens: int, num_offloaded: int, num_staging: int, expected: int
) -> None:
    residency = Residency(num_offloaded=num_offloaded, num_staging=num_staging)

    assert num_request_blocks(EIGHT_GROUPS, residency, num_tokens=num_tokens) == expected


@given(num_blocks=st.integers(0, 200), num_groups=st.integers(1, 40), block_size=st.integers(1, 64))
def test_a_growing_request_fits_at_every_length_up_to_the_longest_and_not_beyond(
    num_blocks: int, num_groups: int, block_size: int
) -> None:
    geometry = BlockGeometry(num_groups=num_groups, block_size=block_size)
    longest = max_tokens_in(geometry, num_blocks=num_blocks)

    fits = [
        min_request_blocks(geometry, num_tokens=n) <= num_blocks
        for n in range(max(0, longest - 2 * block_size), longest + 1)
    ]
    assert all(fits)
    if block_size > 1:
        assert min_request_blocks(geometry, num_tokens=longest + 1) > num_blocks


SIDES = BlockGeometry(
    num_groups=2, block_size=32, side_windows=(64, 64, STATE), max_in_flight_tokens=128
)


@pytest.mark.parametrize(
    ("num_tokens", "num_new_tokens", "expected"),
    [
        pytest.param(0, 0, 0, id="nothing-yet"),
        pytest.param(20, 20, 2 * 1 + 1, id="shorter-than-a-window"),
        pytest.param(90, 1, 2 * 3 + 1, id="no-more-than-its-rows"),
        pytest.param(900, 1, 2 * 3 + 1, id="decodes"),  # 63 + 1 tokens in two blocks, and one
        pytest.param(900, 2, 2 * 4 + 1, id="decodes-two-in-flight"),
        pytest.param(900, 128, 2 * 7 + 1, id="computes-a-prompt"),  # 191 tokens in six, and one
        pytest.param(900, 800, 2 * 7 + 1, id="no-more-in-flight-than-there-may-be"),
    ],
)
def test_side_groups_take_a_window_and_what_is_in_flight(
    num_tokens: int, num_new_tokens: int, expected: int
) -> None:
    assert side_blocks(SIDES, num_tokens=num_tokens, num_new_tokens=num_new_tokens) == expected


def test_side_groups_have_room_for_drafts_behind_what_is_in_flight() -> None:
    drafting = replace(SIDES, max_ahead_tokens=9)

    assert side_blocks(drafting, num_tokens=900, num_new_tokens=800) == 2 * 8 + 1  # of 200 tokens
    assert side_blocks(drafting, num_tokens=900, num_new_tokens=10) == 2 * 4 + 1
    assert (SIDES.max_new_side_blocks, drafting.max_new_side_blocks) == (3, 3 * 2)


def test_a_windows_blocks_may_be_shorter_or_longer_than_the_others() -> None:
    short, long = (replace(SIDES, side_block_size=size) for size in (16, 64))

    assert side_blocks(short, num_tokens=900, num_new_tokens=1) == 2 * 5 + 1  # 64 tokens in four
    assert side_blocks(long, num_tokens=900, num_new_tokens=1) == 2 * 2 + 1
    assert num_request_blocks(short, RESIDENT, num_tokens=64) == 2 * 2


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 63, 64, 65, 200, 224])
def test_what_goes_with_a_request_is_what_its_next_token_attends_to(num_tokens: int) -> None:
    geometry = replace(SIDES, side_windows=(40, STATE))
    *opened, window, state = side_copy_positions(geometry, num_tokens=num_tokens)
    first = max(0, num_tokens - 39)  # of the tokens before it, 39 at most

    assert opened == [range(num_tokens // 32, -(-num_tokens // 32))] * 2
    assert (window[0], window[-1]) == (first // 32, (num_tokens - 1) // 32)
    assert state == range(1)
    copied = sum(map(len, (*opened, window, state)))
    assert copied <= side_copy_blocks(geometry, num_tokens=num_tokens)


def test_without_side_groups_there_are_none() -> None:
    assert side_blocks(EIGHT_GROUPS, num_tokens=900, num_new_tokens=900) == 0


@pytest.mark.parametrize(
    ("num_tokens", "num_ahead", "num_open"),
    [(640, 0, 0), (641, 0, 1), (640, 5, 1), (659, 5, 1), (667, 5, 1), (668, 5, 2), (641, 64, 3)],
)
def test_drafts_open_blocks_behind_what_cannot_be_rejected(
    num_tokens: int, num_ahead: int, num_open: int
) -> None:
    three_left = Residency(num_offloaded=3, num_staging=2)
    geometry = replace(EIGHT_GROUPS, max_ahead_tokens=num_ahead)

    blocks = num_request_blocks(geometry, three_left, num_tokens=num_tokens, num_ahead=num_ahead)

    assert blocks == 5 * (20 + num_open) + 2 * 20 + 3 * num_open
    assert num_open <= geometry.max_open_blocks <= num_open + 1
