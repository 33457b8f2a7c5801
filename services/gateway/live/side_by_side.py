"""Coroutines that belong together."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def side_by_side(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once and return their results in order. When one fails, end the others and raise
    its error.

    Each begins in a turn of the event loop of its own, so that many do not keep the loop from all
    else.
    """
    if len(works) == 1:
        return [await works[0]]
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                tasks.append(group.create_task(work))
                await asyncio.sleep(0)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        for work in works[len(tasks) :]:
            work.close()
    return [task.result() for task in tasks]
