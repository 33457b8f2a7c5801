"""Lets clients watch the engine; nothing is collected while none does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def watch(
    observe: Callable[[], Awaitable[T]], *, interval_s: float, over: asyncio.Event
) -> AsyncIterator[T]:
    """Yield what `observe` returns, at most every `interval_s`, until `over` is set.

    An observation that is still awaited then is dropped.
    """
    loop = asyncio.get_running_loop()
    ending = asyncio.create_task(over.wait())
    try:
        while not ending.done():
            next_s = loop.time() + interval_s
            observing = asyncio.ensure_future(observe())
            try:
                await asyncio.wait([observing, ending], return_when=asyncio.FIRST_COMPLETED)
                if not observing.done():
                    return
                yield observing.result()
            finally:
                observing.cancel()
            await asyncio.wait([ending], timeout=max(0.0, next_s - loop.time()))
    finally:
        ending.cancel()
