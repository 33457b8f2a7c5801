"""How many readers an engine has room for, and what keeps it from more."""

from dataclasses import replace
from typing import Any

import pytest

from services.placement.run.promise import Limit, Promise
from services.placement.run.reader_capacity import ReaderCapacity, ReadersAlike, reader_capacity
from tests.unit.placement.run.snapshots import (
    BLOCK_BYTES,
    COSTS,
    SLOW,
    ask,
    make_engine,
    make_snapshot,
    runs,
)

READERS = ReadersAlike(num_prompt_tokens=200, num_output_tokens=39)


def capacity(
    readers: ReadersAlike = READERS, *, link_bytes_per_s: float = 1e6, **engine: Any
) -> ReaderCapacity:
    return reader_capacity(make_engine(**engine), COSTS, readers, link_bytes_per_s=link_bytes_per_s)


def test_so_many_are_sustained_as_the_pool_can_promise() -> None:
    found = capacity()

    # Each has 60 blocks at the end of its answer. A full pool's step takes 20 ms and 7 halves of
    # their 56 blocks, 27 ms, 1.09 times that beside the prompts of 34 readers: who reads 5 tokens/s
    # runs 0.148 of the time, and 0.0145 on its way back, 60 ms after 3.5 s. So 33 readers have
    # 0.163 x 33 x 60 = 323 blocks, of 360 less half a request; 34 would have 332.
    assert (found.num_held, found.num_kept, found.num_sustained) == (6, 166, 33)
    assert found.limit is found.binds is Limit.POOL
    assert found.num_readers == 33
    assert found.wanted_host_bytes == 33 * 60 * BLOCK_BYTES


def test_the_policy_promises_so_many_and_no_more() -> None:
    readers = replace(READERS, num_output_tokens=38)
    found = capacity(readers)
    asked_per_s = found.num_sustained * readers.rate_tps / readers.num_output_tokens

    def is_promised(num_readers: int) -> bool:
        members = [
            runs(f"r{n}", 200, num_output_tokens=19, max_tokens=38, rate_tps=readers.rate_tps)
            for n in range(num_readers)
        ]
        snapshot = make_snapshot(
            *members, mean_answer_tokens=38.0, prefill_frac=asked_per_s * COSTS.prompt_s(200)
        )
        return Promise(snapshot).holds(members)

    assert is_promised(found.num_sustained)
    assert not is_promised(found.num_sustained + 1)


@pytest.mark.parametrize(
    ("num_host_blocks", "num_readers", "binds"),
    [(1_980, 33, Limit.POOL), (1_979, 32, Limit.HOST), (1_200, 20, Limit.HOST), (0, 6, Limit.HOST)],
)
def test_no_more_take_turns_than_the_host_keeps(
    num_host_blocks: int, num_readers: int, binds: Limit
) -> None:
    found = capacity(num_host_blocks=num_host_blocks)

    assert (found.num_readers, found.binds) == (num_readers, binds)
    assert found.num_sustained == 33


def test_seats_and_a_slow_link_are_named() -> None:
    # 3.6 of 4 seats, and 21 readers have 0.17 each; a way back of 30 s leaves nobody a turn.
    seats = capacity(max_num_seqs=4)
    assert (seats.limit, seats.num_held, seats.num_readers) == (Limit.SEATS, 4, 21)
    slow = capacity(link_bytes_per_s=SLOW)
    assert (slow.limit, slow.num_readers, slow.wanted_host_bytes) == (Limit.LINK, 6, 0)


def test_where_fewer_than_four_fit_turns_bring_nothing() -> None:
    few = capacity(num_blocks=200)

    assert (few.num_held, few.num_readers, few.limit) == (3, 3, Limit.POOL)
    assert "turns would bring no more" in few.in_words()


def test_who_reads_as_fast_as_the_engine_generates_needs_the_pool_always() -> None:
    fast = capacity(replace(READERS, rate_tps=40.0))

    assert (fast.num_readers, fast.wanted_host_bytes) == (6, 0)


def test_a_sentence_says_what_more_host_memory_would_bring() -> None:
    large = replace(capacity(num_host_blocks=1_200), host_bytes=64 * 10**9)
    large = replace(large, wanted_host_bytes=256 * 10**9)

    assert large.in_words() == (
        "20 requests of 239 tokens are read at once at 5 tokens/s (limit: host). The pool holds 6, "
        "64 GB of host memory keep 20; 256 GB would keep 33"
    )
    enough = replace(large, num_kept=33)
    assert enough.in_words() == (
        "33 requests of 239 tokens are read at once at 5 tokens/s (limit: pool). The pool holds 6, "
        "64 GB of host memory keep 33"
    )


def test_what_never_leaves_takes_its_room_in_the_pool_and_on_the_host() -> None:
    # 240 tokens have 60 blocks, and two windows of 40 tokens ceil(40 / 16) + 1 = 4 each.
    found = capacity(side_windows=(40, 40), max_in_flight_tokens=64)

    assert (found.num_held, found.num_kept) == (400 // 68, 10_000 // 68)
    # As above, and of 68 blocks: full are 64, 5.6 requests; who runs 0.137 of the time and on its
    # way 0.016 takes 0.155 x 68.
    assert 400 // 68 < found.num_sustained < capacity().num_sustained
    assert found.wanted_host_bytes == found.num_sustained * 68 * BLOCK_BYTES


def test_readers_keep_windows_and_no_whole_chunks() -> None:
    """A window's 4 blocks beside 60 take a sixteenth of the pool, whatever a chunk had."""
    found = capacity(side_windows=(32,), max_in_flight_tokens=512, num_blocks=400 * 64 // 60)

    assert 31 <= found.num_sustained <= 34


def test_what_readers_are_promised_is_without_their_prompts_chunks() -> None:
    """A prompt's chunk takes 15 blocks of a window for as long as it is computed."""
    engine = make_engine(side_windows=(32,), max_in_flight_tokens=512)
    members = [ask(f"r{n}", 200, max_tokens=39, rate_tps=5.0) for n in range(38)]

    assert Promise(make_snapshot(*members, engine=engine)).holds(members)
