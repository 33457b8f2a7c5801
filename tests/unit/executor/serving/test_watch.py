"""Watching something that the test provides."""

import asyncio

import pytest

from services.executor.serving.watch import watch


async def test_nothing_is_observed_before_somebody_watches_and_after_they_leave() -> None:
    num_observed = 0

    async def observe() -> int:
        nonlocal num_observed
        num_observed += 1
        return num_observed

    updates = watch(observe, interval_s=0.0, over=asyncio.Event())
    assert num_observed == 0
    assert [await anext(updates), await anext(updates)] == [1, 2]
    await updates.aclose()
    await asyncio.sleep(0)

    assert num_observed == 2


async def test_a_watch_ends_with_what_it_watches_though_no_answer_comes() -> None:
    over = asyncio.Event()
    never = asyncio.get_running_loop().create_future()

    async def observe() -> int:
        over.set()
        await never
        return 0

    assert [u async for u in watch(observe, interval_s=0.0, over=over)] == []


async def test_a_failed_observation_reaches_the_watcher() -> None:
    async def observe() -> int:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await anext(watch(observe, interval_s=0.0, over=asyncio.Event()))
