"""Work that only so much of is done at a time, shared fairly among those that ask for it."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

OLDEST_EVERY = 4  # turns of a key: no large work waits for ever for small ones that keep coming


@dataclass(slots=True, eq=False)
class _Waiting:
    size: int
    turn: asyncio.Future[None]


@dataclass(slots=True)
class _Queue:
    """What waits under one key, oldest first."""

    works: list[_Waiting] = field(default_factory=list)
    num_turns: int = 0

    def pop(self) -> _Waiting:
        """Take the smallest, in every fourth turn the oldest."""
        self.num_turns += 1
        takes_oldest = self.num_turns % OLDEST_EVERY == 0
        chosen = self.works[0] if takes_oldest else min(self.works, key=lambda work: work.size)
        self.works.remove(chosen)
        return chosen


class FairTurns:
    """Keys take turns, one piece of work each; a key that comes anew is the last in the round."""

    def __init__(self, num_at_a_time: int = 1) -> None:
        self._num_free = num_at_a_time  # while there are any, nothing waits
        self._waiting: OrderedDict[str, _Queue] = OrderedDict()  # the next key first
        self._running: set[asyncio.Task[Any]] = set()  # the loop itself keeps no task alive

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]], *, key: str, size: int) -> T:
        """Return what `work` returns, once its turn has come. `size` in any unit, >= 0.

        Work that has begun is done to its end, and keeps its turn until then, when this is
        cancelled: a thread cannot be stopped.
        """
        await self._turn(key, size)
        task = asyncio.create_task(work())
        self._running.add(task)
        task.add_done_callback(self._end)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Break off the work that has begun. No other may wait for its turn."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    async def _turn(self, key: str, size: int) -> None:
        """Wait for a turn, and leave no trace if cancelled."""
        if self._num_free:
            self._num_free -= 1
            return
        waiting = _Waiting(size, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(key, _Queue()).works.append(waiting)
        try:
            await asyncio.shield(waiting.turn)
        except asyncio.CancelledError:
            if waiting.turn.done():
                self._pass_on()
            else:
                self._forget(key, waiting)
            raise

    def _forget(self, key: str, waiting: _Waiting) -> None:
        queue = self._waiting[key]
        queue.works.remove(waiting)
        if not queue.works:
            del self._waiting[key]

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self._pass_on()

    def _pass_on(self) -> None:
        """Give a turn that is over to the next key."""
        if not self._waiting:
            self._num_free += 1
            return
        key, queue = next(iter(self._waiting.items()))
        queue.pop().turn.set_result(None)
        self._waiting.move_to_end(key)
        if not queue.works:
            del self._waiting[key]
