"""A reader of a resumable stream that is asked for what comes."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from services.gateway.errors import SupersededError
from services.gateway.resumable.stream import ResumableStream, Step


class StepQueue:
    """Reads a stream. It is open while nothing waits in it, so that steps which are not asked for
    wait where their generation is held for them.
    """

    def __init__(self, stream: ResumableStream, num_had: int) -> None:
        """Read from step `num_had` on, until `close`."""
        self._steps: list[Step] = []
        self._some = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()
        self._reading = asyncio.create_task(stream.read(self, num_had))
        self._reading.add_done_callback(lambda _: self._some.set())

    @property
    def is_open(self) -> bool:
        return not self._steps

    async def opened(self) -> None:
        await self._none.wait()

    def take(self, index: int, step: Step) -> None:
        """Have a step wait, whichever answer it is of."""
        self._steps.append(step)
        self._none.clear()
        self._some.set()

    async def batches(self) -> AsyncIterator[Sequence[Step]]:
        """Yield all steps until the last; raises SupersededError if others are another reader's."""
        while True:
            await self._some.wait()
            self._some.clear()
            steps, self._steps = self._steps, []
            if steps:
                yield steps
            if not self._steps:
                self._none.set()
            if self._reading.done() and not self._steps:
                break
        if not await self._reading:
            raise SupersededError

    def close(self) -> None:
        """Leave the stream. May be called twice."""
        self._reading.cancel()
