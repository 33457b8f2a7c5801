"""vLLM's prefix cache in the pool: who finds what, and what goes first.

That it is vLLM's is for `tests/integration/test_simulated_vllm.py` to say.
"""

import pytest

from services.placement.types import RequestId
from simulator.memory.shared_pool import SharedPool

ONE, OTHER, THIRD = RequestId("one"), RequestId("other"), RequestId("third")
GROUPS = 2


@pytest.fixture
def pool() -> SharedPool:
    return SharedPool(num_blocks=6 * GROUPS, num_groups=GROUPS)


def fill(pool: SharedPool, owner: RequestId, *keys: str, num_open: int = 0) -> None:
    """Let a request have a position per key, and more that are not full."""
    first = pool.owned.get(owner, 0) // GROUPS
    assert pool.set_owned(owner, GROUPS * (first + len(keys) + num_open))
    pool.publish(owner, first, keys)
    pool.check_integrity()


def begin(pool: SharedPool, owner: RequestId, *keys: str) -> int:
    """Let a request begin with what is cached; return how many positions that is."""
    found = pool.cached(keys)
    pool.begin_with(owner, found)
    pool.check_integrity()
    return len(found)


def test_blocks_that_two_use_are_taken_once_and_free_when_both_have_left(pool: SharedPool) -> None:
    fill(pool, ONE, "a", "b", num_open=1)
    assert begin(pool, OTHER, "a", "b", "c") == 2
    assert pool.num_free == 3 * GROUPS

    pool.release(ONE)
    pool.check_integrity()
    assert pool.num_free == 4 * GROUPS
    assert pool.num_free_of(pool.cached(["a", "b"])) == 0

    pool.release(OTHER)
    pool.check_integrity()
    assert pool.num_free == 6 * GROUPS
    assert pool.num_free_of(pool.cached(["a", "b"])) == 2 * GROUPS


def test_who_begins_with_free_blocks_takes_them(pool: SharedPool) -> None:
    fill(pool, ONE, "a", "b")
    pool.release(ONE)

    assert begin(pool, OTHER, "a", "b") == 2
    assert pool.num_free == 4 * GROUPS
    assert not pool.set_owned(THIRD, 5 * GROUPS)
    assert pool.set_owned(THIRD, 4 * GROUPS)
    assert len(pool.cached(["a", "b"])) == 2


def test_what_cannot_be_found_goes_first_then_the_oldest_and_tails_before_heads(
    pool: SharedPool,
) -> None:
    fill(pool, ONE, "a", "b", num_open=1)
    fill(pool, OTHER, "x", num_open=1)
    pool.release(ONE)
    pool.release(OTHER)

    fill(pool, THIRD, "1", "2", "3")  # both open ones, and what nobody ever had
    assert [len(pool.cached([key])) for key in "abx"] == [1, 1, 1]
    fill(pool, THIRD, "4")
    assert [len(pool.cached([key])) for key in "abx"] == [1, 0, 1]
    fill(pool, THIRD, "5")
    assert [len(pool.cached([key])) for key in "abx"] == [0, 0, 1]


def test_of_twins_the_second_is_found_when_the_first_is_gone(pool: SharedPool) -> None:
    fill(pool, ONE, "a")
    fill(pool, OTHER, "a")  # computed at the same time
    assert pool.num_free == 4 * GROUPS
    pool.release(ONE)
    fill(pool, THIRD, "1", "2", "3", "4", "5")

    assert begin(pool, ONE, "a") == 1
    assert pool.num_free == 0


def test_nothing_changes_where_too_few_are_free(pool: SharedPool) -> None:
    fill(pool, ONE, "a", "b", "c", "d")

    assert not pool.set_owned(ONE, 7 * GROUPS)
    pool.check_integrity()
    assert pool.owned == {ONE: 4 * GROUPS}


def test_side_groups_take_the_blocks_of_free_positions(pool: SharedPool) -> None:
    # A position has two blocks: three of side groups take two positions, and one is left over.
    assert pool.set_owned(ONE, 2 * GROUPS + 3, num_side=3)
    pool.check_integrity()
    assert pool.num_free == 2 * GROUPS
    assert pool.owned[ONE] == 2 * GROUPS + 3

    assert pool.set_owned(ONE, 2 * GROUPS + 1, num_side=1)
    pool.check_integrity()
    assert pool.num_free == 3 * GROUPS

    # The one that is left over is the next request's.
    assert pool.set_owned(OTHER, 3 * GROUPS + 1, num_side=1)
    assert pool.num_free == 0
    assert not pool.set_owned(THIRD, 1, num_side=1)
    pool.release(ONE)
    pool.check_integrity()
    assert pool.num_free == 2 * GROUPS
    pool.release(OTHER)
    pool.check_integrity()
    assert pool.num_free == 6 * GROUPS


def test_what_side_groups_take_is_found_no_more(pool: SharedPool) -> None:
    fill(pool, ONE, "a", "b")
    pool.release(ONE)
    assert pool.set_owned(OTHER, 5 * GROUPS, num_side=5 * GROUPS)
    pool.check_integrity()

    assert begin(pool, THIRD, "a", "b") == 1


def test_a_row_grows_into_what_its_side_groups_leave(pool: SharedPool) -> None:
    assert pool.set_owned(ONE, 4 * GROUPS + 4, num_side=4)
    assert pool.num_free == 0

    assert pool.set_owned(ONE, 5 * GROUPS + 2, num_side=2)
    pool.check_integrity()
