"""Host slots: bounded, promised, never owned twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.blocks.host_pool import HostPool, SlotPromise


def test_a_promise_is_kept_while_others_want_the_room() -> None:
    pool = HostPool(10)
    a, b = SlotPromise(), SlotPromise()
    assert pool.reserve(a, 6)

    assert pool.take(b, 5) is None
    assert pool.take(b, 4) is not None
    assert pool.take(a, 6) is not None
    assert pool.num_free == 0


def test_a_promise_that_does_not_fit_changes_nothing() -> None:
    pool = HostPool(10)
    a, b, c = SlotPromise(), SlotPromise(), SlotPromise()
    assert pool.reserve(a, 6)

    assert not pool.reserve(b, 5)
    assert pool.reserve(c, 4)


def test_beyond_its_promise_a_request_takes_what_nobody_was_promised() -> None:
    pool = HostPool(10)
    a, b = SlotPromise(), SlotPromise()
    pool.reserve(a, 2)
    pool.reserve(b, 5)

    assert pool.can_take(a, 5)
    assert not pool.can_take(a, 6)
    assert pool.take(a, 6) is None
    assert len(pool.take(a, 5) or []) == 5


def test_what_is_left_of_a_promise_ends_with_its_request() -> None:
    pool = HostPool(4)
    a, b = SlotPromise(), SlotPromise()
    pool.reserve(a, 4)
    taken = pool.take(a, 1)
    assert taken is not None

    pool.give_back(taken)
    pool.withdraw(a)

    assert pool.take(b, 4) is not None


def test_only_usable_slots_are_promised_and_taken_and_more_become_usable() -> None:
    pool = HostPool(10, num_ready=3)
    a = SlotPromise()
    assert not pool.reserve(a, 4)
    first = pool.take(a, 3)
    assert first == [0, 1, 2]
    assert pool.take(a, 1) is None

    pool.open_slots(5)

    assert pool.take(a, 2) == [3, 4]
    pool.open_slots(4)  # a rank cannot take memory back
    assert (pool.num_free, pool.num_used) == (0, 5)
    pool.open_slots(1_000)
    assert pool.num_free == 5
    pool.check_integrity([0, 1, 2, 3, 4], [a])


def test_integrity_notices_a_lost_and_a_doubled_slot() -> None:
    pool = HostPool(3)
    a = SlotPromise()
    taken = pool.take(a, 2)
    assert taken is not None

    pool.check_integrity(taken, [a])
    with pytest.raises(AssertionError):
        pool.check_integrity(taken[:1], [a])
    with pytest.raises(AssertionError):
        pool.check_integrity([*taken, taken[0]], [a])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=30))
def test_any_sequence_of_calls_keeps_every_slot_owned_once(calls: list[tuple[str, int]]) -> None:
    pool = HostPool(12)
    owned: dict[str, list[int]] = {}
    promises = {name: SlotPromise() for name in "abc"}
    for name, number in calls:
        if name in owned and number == 0:
            pool.give_back(owned.pop(name))
            pool.withdraw(promises[name])
        elif name not in owned:
            if pool.reserve(promises[name], number):
                owned[name] = []
        elif pool.can_take(promises[name], number):
            owned[name] += pool.take(promises[name], number) or []
        else:
            assert pool.take(promises[name], number) is None
        slots = [slot for slots in owned.values() for slot in slots]
        pool.check_integrity(slots, promises.values())


def test_a_slot_in_quarantine_comes_back_only_when_that_ends() -> None:
    pool = HostPool(4)
    a, b = SlotPromise(), SlotPromise()
    slots = pool.take(a, 2) or []
    pool.quarantine(frozenset(slots[:1]))

    pool.give_back(slots)

    assert pool.num_free == 3
    pool.check_integrity([], [a, b])
    assert slots[0] not in (pool.take(b, 3) or [])
    pool.quarantine(frozenset())
    assert pool.num_free == 1


def test_a_free_slot_is_taken_out_of_use_by_its_quarantine() -> None:
    pool = HostPool(4)

    pool.quarantine(frozenset({0, 3}))

    assert pool.num_free == 2
    pool.check_integrity([], [])
    pool.quarantine(frozenset({3}))
    assert pool.num_free == 3
    pool.check_integrity([], [])


def test_a_promise_that_quarantine_has_broken_is_not_kept_and_nothing_changes() -> None:
    pool = HostPool(4)
    a = SlotPromise()
    assert pool.reserve(a, 4)
    pool.quarantine(frozenset({0, 1}))

    assert pool.take(a, 4) is None
    assert pool.num_free == 2
    pool.check_integrity([], [a])


def test_a_limit_leaves_the_first_slots() -> None:
    pool = HostPool(10)
    a = SlotPromise()
    pool.limit(3)

    assert sorted(pool.take(a, 3) or []) == [0, 1, 2]
    assert pool.take(a, 1) is None


def test_a_limit_that_is_said_again_changes_nothing() -> None:
    """vLLM 0.33 asks the ranks once more when it wakes up, and requests have slots by then."""
    pool = HostPool(10)
    a, b = SlotPromise(), SlotPromise()
    pool.limit(6)
    assert pool.reserve(a, 2)
    assert pool.reserve(b, 1)
    taken = pool.take(a, 2) or []
    pool.limit(6)

    pool.check_integrity(taken, [b])
    assert (pool.num_slots, pool.num_free) == (6, 4)


def test_an_unbacked_promise_takes_nothing_from_others_and_nothing_is_left_beside_it() -> None:
    pool = HostPool(10)
    a, b, c = SlotPromise(), SlotPromise(), SlotPromise()
    assert pool.reserve(a, 6)
    pool.reserve_unbacked(b, 8)
    pool.check_integrity([], [a, b, c])

    assert pool.can_take(b, 8)
    assert not pool.can_take(c, 1)
    slots = pool.take(a, 6)
    assert slots is not None
    assert not pool.reserve(c, 1)

    pool.give_back(slots)
    pool.back(b)
    assert len(pool.take(b, 8) or []) == 8
