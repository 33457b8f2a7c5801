"""Coroutines that belong together."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def side_by_side(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once and return their results in order. When one fails, end the others and raise
    its error.
    """
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
