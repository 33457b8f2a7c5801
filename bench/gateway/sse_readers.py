"""Many readers of server-sent events, as a light process: when each token came, against its turn.

`python -m bench.gateway.sse_readers PORT SCHEDULE`, the schedule as JSON. Prints a line when all
streams are open, and figures as JSON when all have ended.
"""

import asyncio
import gc
import json
import re
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import cast

import numpy as np
import uvloop

from bench.gateway.schedule import Schedule
from bench.gateway.synthetic_executor import MODEL
from services.pacing.deposit import due_times_s

WARM_FRAC = 0.2  # of every stream's tokens, which are not counted: the first ones
CONNECTS_AT_ONCE = 32
_GENERATED = re.compile(rb'"content":"(\d+\.\d+)"')


class SseReader(asyncio.Protocol):
    """Asks for one stream and notes what came when; reads nothing into it before the end."""

    def __init__(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.opened, self.ended = loop.create_future(), loop.create_future()
        self._request = request
        self._pieces: list[tuple[float, bytes]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.monotonic(), data))
        if len(self._pieces) == 1:
            self.opened.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)

    def tokens(self) -> Iterator[tuple[float, float]]:
        """Yield when each token was generated and when its last byte came."""
        ends = list(accumulate(len(data) for _, data in self._pieces))
        for found in _GENERATED.finditer(b"".join(data for _, data in self._pieces)):
            yield float(found[1]), self._pieces[bisect_left(ends, found.end())][0]


async def read_all(port: int, schedule: Schedule) -> dict[str, float]:
    """Open all streams, read them to their end, return the release errors' quantiles."""
    loop, request = asyncio.get_running_loop(), request_for(1 / schedule.interval_s)
    readers: list[SseReader] = []
    while len(readers) < schedule.num_streams:
        batch = min(CONNECTS_AT_ONCE, schedule.num_streams - len(readers))
        new = [
            loop.create_connection(lambda: SseReader(request), "127.0.0.1", port)
            for _ in range(batch)
        ]
        readers += [reader for _, reader in await asyncio.gather(*new)]
        await asyncio.gather(*(reader.opened for reader in readers[-batch:]))
    gc.freeze()
    gc.disable()
    print("open", flush=True)
    await asyncio.gather(*(reader.ended for reader in readers))
    return _figures(readers, schedule)


def request_for(rate_tps: float) -> bytes:
    """Return an HTTP request for a stream at so many tokens per second, the only one of its
    connection.
    """
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Count."}],
            "stream": True,
            "evenflow": {"consumption_rate_tps": rate_tps, "pace_tail": True},
        }
    )
    return (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()


def _figures(readers: list[SseReader], schedule: Schedule) -> dict[str, float]:
    num_warm = int(WARM_FRAC * schedule.num_tokens)
    errors: list[float] = []
    for reader in readers:
        generated_s, received_s = zip(*reader.tokens(), strict=True)
        assert len(received_s) == schedule.num_tokens, "tokens are missing"
        due_s = due_times_s(generated_s, schedule.interval_s)
        pairs = list(zip(received_s, due_s, strict=True))[num_warm:]
        errors += [received - due for received, due in pairs]
    quantiles = np.quantile(errors, [0, 0.5, 0.9, 0.99, 0.999, 1])
    names = ("min", "p50", "p90", "p99", "p999", "max")
    return dict(zip(names, map(float, quantiles), strict=True)) | {"num_tokens": len(errors)}


if __name__ == "__main__":
    print(json.dumps(uvloop.run(read_all(int(sys.argv[1]), Schedule(**json.loads(sys.argv[2]))))))
