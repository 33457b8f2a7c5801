"""What is large, or comes in numbers, leaves turns of the event loop to everything else."""

import asyncio
import threading

import pytest

from services.gateway.access.api_keys import bind_address
from services.gateway.http.edge import LARGE_BODY_BYTES, LargeBodies
from services.gateway.live.side_by_side import side_by_side


async def test_each_of_many_works_begins_in_a_turn_of_its_own() -> None:
    turns: list[str] = []

    async def others() -> None:
        while True:
            turns.append("other")
            await asyncio.sleep(0)

    async def work(name: str) -> str:
        turns.append(name)
        return name

    running = asyncio.create_task(others())
    assert await side_by_side([work("a"), work("b"), work("c")]) == ["a", "b", "c"]
    running.cancel()

    begun = [turns.index(name) for name in "abc"]
    assert "other" in turns[begun[0] : begun[1]]
    assert "other" in turns[begun[1] : begun[2]]


async def test_a_work_that_fails_keeps_the_rest_from_beginning() -> None:
    begun: list[int] = []

    async def work(number: int) -> None:
        begun.append(number)
        raise KeyError(number)

    with pytest.raises(KeyError, match="0"):
        await side_by_side([work(number) for number in range(9)])

    assert len(begun) < 9


async def test_large_bodies_are_read_off_the_loop_one_at_a_time() -> None:
    bodies, loop_thread = LargeBodies(), threading.get_ident()
    num_reading = 0

    def checked() -> tuple[int, int]:
        nonlocal num_reading
        num_reading += 1
        seen = num_reading
        num_reading -= 1
        return threading.get_ident(), seen

    large = [bodies.read(bytearray(LARGE_BODY_BYTES), checked) for _ in range(20)]
    got = await asyncio.gather(*large)
    small_thread, _ = await bodies.read(bytearray(LARGE_BODY_BYTES - 1), checked)

    assert all(thread != loop_thread and seen == 1 for thread, seen in got)
    assert small_thread == loop_thread


async def test_a_large_body_waits_for_one_of_each_other_client_at_most() -> None:
    bodies, order = LargeBodies(), []
    may_end = threading.Event()

    async def read(client: str) -> None:
        bind_address(client)
        size = bytearray(LARGE_BODY_BYTES)
        await bodies.read(size, lambda: (may_end.wait(), order.append(client)))

    reading = [asyncio.create_task(read(client)) for client in ("a", "a", "a", "b")]
    for _ in range(10):
        await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(*reading)

    assert order == ["a", "a", "b", "a"]
