"""What requests left in the pool is found there until its blocks are needed."""

from services.placement.types import RequestId
from simulator.memory.pool import PoolLedger

ONE, OTHER = RequestId("one"), RequestId("other")


def test_blocks_are_found_once_by_each_layer_group() -> None:
    pool = PoolLedger(num_blocks=10)
    pool.leave(["a", "b"], {0, 2})

    assert pool.num_to_find(["a", "b", "c"], [0, 1, 2]) == 4
    assert pool.find(["a", "b", "c"], 0) == 2
    assert pool.find(["a", "b", "c"], 0) == 0
    assert pool.find(["a", "b", "c"], 1) == 0
    pool.check_integrity()
    assert pool.num_left == 2


def test_what_was_left_first_goes_first_and_tails_before_heads() -> None:
    pool = PoolLedger(num_blocks=10)
    pool.leave(["a", "b", "c"], {0, 1})
    pool.leave(["x"], {0, 1})
    assert pool.set_owned(ONE, 2)  # there are two that hold nothing
    assert pool.num_left == 8

    assert pool.set_owned(ONE, 5)

    pool.check_integrity()
    assert pool.num_to_find(["a", "b", "c"], [0, 1]) == 2  # "c" and "b" are gone
    assert pool.num_to_find(["x"], [0, 1]) == 2


def test_of_two_that_leave_the_same_each_layer_group_s_is_there_once() -> None:
    pool = PoolLedger(num_blocks=10)
    pool.leave(["a"], {0, 1})
    pool.leave(["b"], {0})
    pool.leave(["a"], {0, 2})

    assert pool.num_left == 4
    pool.set_owned(OTHER, 7)
    assert pool.num_to_find(["a"], [0, 1, 2]) == 3  # as if all were left now
    pool.check_integrity()
