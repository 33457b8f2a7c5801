"""Turns are shared among keys; a key's small work goes before its large, which still comes."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kit.fair_turns import OLDEST_EVERY, FairTurns

Work = tuple[str, int]  # whose, and how large


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Bench:
    """Works that end when they are told to; the first one holds the only turn."""

    def __init__(self, num_at_a_time: int = 1) -> None:
        self.turns = FairTurns(num_at_a_time)
        self.begun: list[Work] = []
        self._ends: list[asyncio.Event] = []

    def ask(self, key: str, size: int) -> asyncio.Task[Work]:
        async def work() -> Work:
            self.begun.append((key, size))
            self._ends.append(asyncio.Event())
            await self._ends[-1].wait()
            return key, size

        return asyncio.create_task(self.turns.run(work, key=key, size=size))

    async def end_one(self) -> None:
        self._ends[len([end for end in self._ends if end.is_set()])].set()
        await settled()


async def order_of(works: Sequence[Work]) -> list[Work]:
    """Return the order in which `works` begin that come while another one is done."""
    bench = Bench()
    tasks = [bench.ask("first", 0)]
    await settled()
    for work in works:
        tasks.append(bench.ask(*work))
        await settled()
    for _ in tasks:
        await bench.end_one()
    assert [await task for task in tasks[1:]] == list(works)
    return bench.begun[1:]


@pytest.mark.parametrize(
    ("works", "order"),
    [
        # Three of a's came before b's and c's: each key has one turn of a round.
        ("a1 a2 a3 b1 c1 c2", "a1 b1 c1 a2 c2 a3"),
        # Small before large, in the order of arrival where they are the same.
        ("a9 a2 a5 b7 b3", "a2 b3 a5 b7 a9"),
        # The fourth turn is the oldest's, and the fifth the smallest's again.
        ("a9 a8 a1 a2 a3 a4 a5", "a1 a2 a3 a9 a4 a5 a8"),
    ],
)
async def test_keys_take_turns_and_small_work_goes_before_large(works: str, order: str) -> None:
    begun = await order_of([(work[0], int(work[1:])) for work in works.split()])

    assert " ".join(f"{key}{size}" for key, size in begun) == order


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9)), max_size=24))
def test_no_turn_of_a_key_waits_for_two_of_another(works: list[Work]) -> None:
    begun = asyncio.run(order_of(works))

    assert sorted(begun) == sorted(works)
    for key in {key for key, _ in works}:
        places = [place for place, (whose, _) in enumerate(begun) if whose == key]
        for after, before in zip([-1, *places], places, strict=False):
            between = [whose for whose, _ in begun[after + 1 : before]]
            assert len(between) == len(set(between))
        own = [size for whose, size in begun if whose == key]
        for turn, size in enumerate(own, start=1):
            assert turn % OLDEST_EVERY == 0 or size == min(own[turn - 1 :])


async def test_a_key_that_comes_anew_is_last_in_the_round() -> None:
    bench = Bench()
    for work in (("a", 1), ("b", 1), ("c", 1)):
        bench.ask(*work)
        await settled()
    await bench.end_one()
    bench.ask("a", 0)
    await settled()
    for _ in range(3):
        await bench.end_one()

    assert [key for key, _ in bench.begun] == ["a", "b", "c", "a"]


async def test_so_many_are_done_at_a_time_and_no_more() -> None:
    bench = Bench(num_at_a_time=2)
    for size in range(4):
        bench.ask("a", size)
    await settled()
    assert len(bench.begun) == 2
    await bench.end_one()
    assert len(bench.begun) == 3
    await bench.end_one()
    await bench.end_one()
    await bench.end_one()
    for size in range(3):
        bench.ask("b", size)
    await settled()
    assert len(bench.begun) == 6  # two turns are free again, not three


async def test_what_is_cancelled_while_it_waits_leaves_no_trace() -> None:
    bench = Bench()
    bench.ask("first", 0)
    await settled()
    gone = [bench.ask("a", 1), bench.ask("b", 1)]
    bench.ask("b", 2)
    await settled()
    for task in gone:
        task.cancel()
    await settled()
    bench.ask("a", 3)  # the last in the round, for a's earlier place is gone
    await settled()
    for _ in range(3):
        await bench.end_one()

    assert bench.begun == [("first", 0), ("b", 2), ("a", 3)]
    assert all(task.cancelled() for task in gone)


async def test_a_turn_that_comes_as_its_work_is_cancelled_goes_to_the_next() -> None:
    bench = Bench()
    bench.ask("first", 0)
    await settled()
    gone, kept = bench.ask("a", 1), bench.ask("b", 1)
    await settled()
    bench.turns._pass_on()  # the turn is a's, which has not run yet
    gone.cancel()
    await settled()

    assert gone.cancelled()
    assert bench.begun == [("first", 0), ("b", 1)]
    kept.cancel()


async def test_begun_work_keeps_its_turn_to_its_end_though_it_is_cancelled() -> None:
    bench = Bench()
    gone = bench.ask("a", 1)
    await settled()
    bench.ask("b", 1)
    await settled()
    gone.cancel()
    await settled()
    assert gone.cancelled()
    assert len(bench.begun) == 1
    await bench.end_one()
    assert len(bench.begun) == 2


async def test_work_that_fails_says_so_and_gives_its_turn_back() -> None:
    turns = FairTurns()

    async def fail() -> None:
        raise KeyError("a")

    async def succeed() -> int:
        return 7

    with pytest.raises(KeyError):
        await turns.run(fail, key="a", size=1)
    assert await turns.run(succeed, key="a", size=1) == 7


async def test_closing_breaks_off_what_has_begun() -> None:
    bench = Bench()
    begun = bench.ask("a", 1)
    await settled()
    await bench.turns.close()

    with pytest.raises(asyncio.CancelledError):
        await begun
    await bench.turns.close()  # there is nothing left
