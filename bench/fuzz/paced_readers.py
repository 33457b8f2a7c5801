"""Readers that do nothing wrong, as a process: how late their tokens come.

`python -m bench.fuzz.paced_readers PORT NUM INTERVAL_S` reads paced streams one after the other,
NUM at a time, and prints after each interval figures of the streams that ended in it, as JSON.
"""

import asyncio
import json
import random
import sys

import numpy as np
import numpy.typing as npt
import uvloop

from bench.fuzz.executor import NUM_COUNTED
from bench.gateway.sse_readers import WARM_FRAC, SseReader, request_for
from services.pacing.deposit import due_times_s

INTERVAL_S = 0.05


class PacedReaders:
    """Counts and measures streams."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._request = request_for(1 / INTERVAL_S)
        self._errors_s: list[npt.NDArray[np.float32]] = []
        self._num_failed = 0

    async def read(self) -> None:
        """Read streams until cancelled."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(random.uniform(0, 2))  # so that their turns are spread
        while True:
            _, reader = await loop.create_connection(
                lambda: SseReader(self._request), "127.0.0.1", self._port
            )
            await reader.ended
            self._note(list(reader.tokens()))

    def _note(self, tokens: list[tuple[float, float]]) -> None:
        if len(tokens) != NUM_COUNTED:
            self._num_failed += 1
            return
        generated_s, received_s = zip(*tokens, strict=True)
        due_s = due_times_s(generated_s, INTERVAL_S)
        errors_s = np.subtract(received_s, due_s, dtype=np.float64)
        self._errors_s.append(errors_s[int(WARM_FRAC * NUM_COUNTED) :].astype(np.float32))

    def figures(self) -> dict[str, float]:
        """Return those of the streams since the last call."""
        errors_s, self._errors_s = self._errors_s, []
        figures = {"num_streams": float(len(errors_s)), "num_failed": float(self._num_failed)}
        if errors_s:
            quantiles = np.quantile(np.concatenate(errors_s), [0.5, 0.99, 1])
            figures |= dict(zip(("p50_s", "p99_s", "max_s"), map(float, quantiles), strict=True))
        return figures


async def tell(readers: PacedReaders, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        print(json.dumps(readers.figures()), flush=True)


async def main(port: int, num_streams: int, interval_s: float) -> None:
    readers = PacedReaders(port)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_streams):
            tasks.create_task(readers.read())
        tasks.create_task(tell(readers, interval_s))


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
