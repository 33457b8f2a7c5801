"""What free blocks of the pool still hold is found once, and not after anybody else had them."""

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.control.prefixes.anchors import Anchor
from services.control.prefixes.prefix_cache import Column
from services.executor.blocks.host_pool import HostPool
from services.executor.blocks.pool_blocks import PoolBlocks
from services.executor.blocks.quarantine import Quarantine
from services.executor.blocks.step_orders import StepOrders

pytestmark = pytest.mark.filterwarnings("default")

NUM_BLOCKS = 8  # usable ones


class Rig:
    """A pool, and what the ranks are told to poison."""

    def __init__(self) -> None:
        self.orders = StepOrders()
        self.pool = BlockPool(NUM_BLOCKS + 1, False, 16)
        self.lost: list[int] = []  # columns that no free blocks hold any more, by uid
        self.blocks = PoolBlocks(
            self.pool,
            self.orders,
            lambda column: self.lost.append(column.uid),
            poison_freed=True,
        )

    def leave(self, uid: int, *blocks: KVCacheBlock | None) -> None:
        self.blocks.leave([(Column(uid, (), uid), blocks)])
        self.blocks.check_integrity()

    def found(self, uid: int, group: int) -> KVCacheBlock | None:
        (block,) = self.blocks.find([uid], group)
        self.blocks.check_integrity()
        return block

    def poisoned(self) -> list[int]:
        return self.orders.take(loading=[], saves=[]).poisoned_block_ids


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_block_is_found_once_and_is_its_finders_own(rig: Rig) -> None:
    one, other = rig.blocks.take(2)
    rig.leave(7, one, other)
    assert rig.blocks.num_free == NUM_BLOCKS
    assert rig.blocks.num_to_find([6, 7], [0, 1]) == 2

    assert rig.found(7, 1) is other

    assert other.ref_cnt == 1
    assert rig.blocks.num_free == NUM_BLOCKS - 1
    assert rig.found(7, 1) is None
    assert rig.blocks.num_to_find([7], [0, 1]) == 1
    assert rig.poisoned() == []


def test_groups_without_a_block_of_their_own_leave_none(rig: Rig) -> None:
    (one,) = rig.blocks.take(1)
    rig.leave(7, None, one)

    assert rig.found(7, 0) is None
    assert rig.found(7, 1) is one
    assert rig.blocks.num_left == 0


def test_blocks_that_were_left_are_taken_last_and_found_no_more(rig: Rig) -> None:
    one, other = rig.blocks.take(2)
    usual = rig.blocks.take(2)
    rig.leave(7, one)
    rig.leave(8, other)
    rig.blocks.release(usual)
    assert sorted(rig.poisoned()) == sorted(block.block_id for block in usual)

    taken = rig.blocks.take(NUM_BLOCKS - 1)  # all but the one that was left last

    assert one in taken
    assert rig.found(7, 0) is None
    assert rig.poisoned() == [one.block_id]
    assert rig.found(8, 0) is other


def test_a_block_that_was_found_and_is_left_anew_holds_what_it_was_left_with(rig: Rig) -> None:
    (one,) = rig.blocks.take(1)
    rig.leave(7, one)
    assert rig.found(7, 0) is one
    rig.leave(8, one)
    assert rig.found(7, 0) is None
    assert rig.found(8, 0) is one
    rig.blocks.release([one])
    rig.poisoned()

    rig.blocks.take(NUM_BLOCKS)

    assert rig.poisoned() == []  # it was nobody's to be told of


def test_of_two_that_leave_the_same_the_later_is_found(rig: Rig) -> None:
    one, other = rig.blocks.take(2)
    rig.leave(7, one)
    rig.leave(7, other)

    assert rig.poisoned() == [one.block_id]
    assert rig.found(7, 0) is other


def test_what_is_left_of_a_column_bit_by_bit_is_one_column(rig: Rig) -> None:
    one, other = rig.blocks.take(2)
    column = Column(7, (), 7)
    rig.blocks.leave([(column, [one, None])])
    assert not column.is_left

    rig.blocks.leave([(column, [None, other])])

    rig.blocks.check_integrity()
    assert column.is_left
    assert rig.blocks.num_to_find([7], [0, 1]) == 2
    assert (rig.found(7, 0), rig.found(7, 1)) == (one, other)
    assert not column.is_left
    assert rig.poisoned() == []


def test_of_two_that_leave_a_part_each_layer_group_s_last_is_found(rig: Rig) -> None:
    one, two, other = rig.blocks.take(3)
    rig.leave(7, one, two)
    rig.leave(7, None, other)

    assert rig.poisoned() == [two.block_id]
    assert (rig.found(7, 0), rig.found(7, 1)) == (one, other)


def anchor(num_blocks: int) -> Anchor:
    return Anchor(key=7, tokens=(), slots=(*range(num_blocks),), copy=None)


def test_an_anchor_s_blocks_are_found_once_in_the_order_of_its_slots(rig: Rig) -> None:
    its, other = anchor(3), anchor(1)
    one, two, three, four = rig.blocks.take(4)
    rig.blocks.leave_anchor(its, [one, two, three])
    rig.blocks.leave_anchor(other, [four])
    rig.blocks.check_integrity()
    assert (rig.blocks.num_left_of(its), rig.blocks.num_free) == (3, NUM_BLOCKS)
    rig.blocks.take(NUM_BLOCKS - 3)  # the first of those that were left goes to others

    found = rig.blocks.find_anchor(its)

    assert found == [None, two, three]
    assert rig.blocks.num_free == 1
    assert rig.blocks.find_anchor(its) == [None, None, None]
    assert rig.blocks.num_left_of(its) == 0
    assert rig.blocks.find_anchor(other) == [four]
    assert rig.poisoned() == [one.block_id]
    rig.blocks.check_integrity()


def test_nothing_is_found_after_it_was_forgotten(rig: Rig) -> None:
    one, other = rig.blocks.take(2)
    rig.leave(7, one)
    rig.leave(8, other)

    rig.blocks.forget_left({one.block_id})
    assert rig.blocks.num_to_find([7, 8], [0]) == 1
    rig.blocks.forget_left()

    assert rig.blocks.num_left == 0
    assert rig.poisoned() == [one.block_id, other.block_id]


def test_what_a_hung_copy_may_still_write_is_not_found(rig: Rig) -> None:
    quarantine = Quarantine(rig.blocks, HostPool(4))
    before, after, other = rig.blocks.take(3)
    quarantine.update(frozenset({before.block_id}), frozenset())
    rig.leave(7, before, other)
    rig.leave(8, after)
    quarantine.update(frozenset({before.block_id, after.block_id}), frozenset())

    assert rig.found(7, 0) is None
    assert rig.found(8, 0) is None
    assert rig.found(7, 1) is other
    assert rig.blocks.num_free == NUM_BLOCKS - 3
    quarantine.update(frozenset(), frozenset())
    assert rig.blocks.num_free == NUM_BLOCKS - 1
