"""Keys that a Redis Cluster accepts in one script."""

from redis.crc import key_slot

from services.tracker.redis.keys import keys_of
from services.tracker.types import ExecutorId


def test_all_keys_of_an_executor_share_a_slot() -> None:
    keys = keys_of(ExecutorId("ex-0:50051"))

    assert len({key_slot(each.encode()) for each in keys}) == 1


def test_executors_spread_over_slots() -> None:
    slots = {key_slot(keys_of(ExecutorId(f"ex{i}")).lease.encode()) for i in range(8)}

    assert len(slots) > 1


def test_no_two_keys_are_the_same() -> None:
    keys = keys_of(ExecutorId("a"))

    assert len({*keys, *keys_of(ExecutorId("b"))}) == 6
