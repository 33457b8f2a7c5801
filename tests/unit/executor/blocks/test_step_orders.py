"""A step's message says each thing once, and nothing about requests that are gone."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.blocks.holder import GroupKV
from services.executor.blocks.residency import RequestKV
from services.executor.blocks.step_orders import StepOrders
from services.executor.step_messages import (
    LoadTableUpdate,
    RestoreOrder,
    RowEdit,
    StepFeedback,
)
from tests.unit.records import make_record

pytestmark = pytest.mark.filterwarnings("default")


def test_edits_of_one_row_travel_as_few_stretches() -> None:
    orders = StepOrders()
    for position in (4, 2, 3, 9):
        orders.edit_row(("r", 1), position, [100 + position])
    orders.edit_row(("r", 1), 3, [7])

    assert orders.take(loading=[], saves=[]).row_edits == [
        RowEdit("r", 1, 2, [102, 7, 104]),
        RowEdit("r", 1, 9, [109]),
    ]


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.lists(st.integers(1, 99), min_size=1, max_size=6)),
        max_size=12,
    )
)
def test_later_edits_of_a_stretch_replace_earlier_ones_and_no_two_meet(
    edits: list[tuple[int, list[int]]],
) -> None:
    orders, row = StepOrders(), {}
    for start, block_ids in edits:
        orders.edit_row(("r", 1), start, block_ids)
        row.update(zip(range(start, start + len(block_ids)), block_ids, strict=True))

    sent = orders.take(loading=[], saves=[]).row_edits

    found = [(e.start + n, block_id) for e in sent for n, block_id in enumerate(e.block_ids)]
    assert found == sorted(row.items())
    ends = [(edit.start, edit.start + len(edit.block_ids)) for edit in sent]
    assert all(end < begin for (_, end), (begin, _) in pairwise(ends))


def test_steps_count_from_one_and_start_empty() -> None:
    orders = StepOrders()
    orders.edit_row(("r", 0), 0, [1])
    first, second = (orders.take(loading=[], saves=[]) for _ in range(2))

    assert (first.step, second.step) == (1, 2)
    assert second.row_edits == []


def test_a_replaced_table_takes_what_is_appended_after_it_and_drops_what_was_before() -> None:
    orders = StepOrders()
    orders.append_table(("r", 0), 0, range(7, 8))
    orders.replace_table(("r", 0), 1)
    orders.append_table(("r", 0), 1, range(2))
    orders.append_table(("r", 0), 1, range(2, 3))
    orders.append_table(("r", 1), 0, range(5, 6))

    assert orders.take(loading=[], saves=[]).table_updates == [
        LoadTableUpdate("r", 0, True, 1, [range(3)]),
        LoadTableUpdate("r", 1, False, 0, [range(5, 6)]),
    ]


def test_what_a_row_shows_of_a_staging_buffer_replaces_what_it_was_to_show_before() -> None:
    orders = StepOrders()
    orders.edit_row(("r", 0), 2, [7, 8, 9])
    orders.append_table(("r", 0), 0, range(3, 4))

    assert orders.take(loading=[], saves=[]).row_edits == [
        RowEdit("r", 0, 2, [7]),
        RowEdit("r", 0, 4, [9]),
    ]


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 6), st.lists(st.integers(1, 99), max_size=4)),
        max_size=12,
    )
)
def test_a_rank_has_the_blocks_of_a_staging_buffer_after_any_history(
    changes: list[tuple[bool, int, list[int]]],
) -> None:
    orders, here, there = StepOrders(), [], []
    for is_sent, start, block_ids in changes:
        start = min(start, len(here))
        here[start:] = block_ids
        orders.fill_staging("r", 0, start, block_ids)
        if is_sent:
            for update in orders.take(loading=[], saves=[]).staging_updates:
                there[update.start :] = update.block_ids

    for update in orders.take(loading=[], saves=[]).staging_updates:
        there[update.start :] = update.block_ids
    assert there == here


def test_a_dropped_request_leaves_no_orders_behind() -> None:
    orders = StepOrders()
    orders.edit_row(("gone", 0), 0, [1])
    orders.append_table(("gone", 0), 0, range(1))
    orders.set_staging("gone", 2)
    orders.fill_staging("gone", 1, 0, [1])
    parts = [GroupKV(row=[], host_slots=[slot]) for slot in (1, 2)]
    gone = RequestKV(record=make_record("gone"), groups=parts, mirrored=True, block_size=4)
    orders.begin_with(gone)
    orders.drop_request("gone", num_kept=1)
    orders.drop_request("gone")

    message = orders.take(loading=[], saves=[])

    assert (message.row_edits, message.table_updates, message.num_staging) == ([], [], {})
    assert (message.staging_updates, message.prefixes, message.num_kept_slots) == ([], [], {})
    assert message.dropped_tables == [("gone", None)]


def test_a_restore_that_no_rank_has_heard_of_is_simply_forgotten() -> None:
    orders = StepOrders()
    orders.restore(RestoreOrder(1, "r", 0, [0], [1], [1]))
    assert not orders.cancel_restore(1)
    assert orders.take(loading=[], saves=[]).restores == []

    orders.restore(RestoreOrder(2, "r", 0, [0], [1], [1]))
    orders.take(loading=[], saves=[])
    assert orders.cancel_restore(2)
    assert orders.take(loading=[], saves=[]).cancelled_restores == [2]


def test_feedback_of_ranks_counts_the_slowest_save_and_every_restore() -> None:
    first = StepFeedback(step=7, saved_step=7)
    first.num_ranks_done.update([1, 2])
    second = StepFeedback(step=7, saved_step=5)
    second.num_ranks_done.update([2])

    together = first.aggregate(second)

    assert together.saved_step == 5
    assert together.num_ranks_done == {1: 1, 2: 2}
