"""Whether connections that promise a request and do not send it end in time, and disturb no stream.

256 paced streams of one gateway, once alone and once beside 300 such connections: a third silent, a
third with half a head, a third with half a body.
"""

import asyncio
import time
from collections.abc import Sequence

from bench.document import Benchmark, Row
from bench.gateway.schedule import Schedule
from bench.gateway.streams import INTERVAL_S, streams_read

NUM_STREAMS, NUM_HALF_OPEN = 256, 300
SECONDS = 45  # of each stream; half a body is given 30
_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
BEGINNINGS = {
    "silent": b"",
    "half a head": _HEAD,
    "half a body": _HEAD + b"content-length: 100\r\n\r\n{",
}


def measure() -> list[Row]:
    return [_measure(num_half_open) for num_half_open in (0, NUM_HALF_OPEN)]


def _measure(num_half_open: int) -> Row:
    schedule = Schedule(
        num_streams=NUM_STREAMS,
        interval_s=INTERVAL_S,
        burst=10,
        staggered=True,
        speedup=1.1,
        num_bursts=int(SECONDS / INTERVAL_S / 10),
    )
    with streams_read(schedule) as reading:
        kept_s = asyncio.run(_all_kept_s(reading.port, num_half_open))
        errors = reading.errors_s()
    return {"num_half_open": num_half_open, "release_error_s": errors, "kept_s": kept_s}


async def _all_kept_s(port: int, num_half_open: int) -> dict[str, float]:
    """Open connections; return for each kind how long one of it was kept at most."""
    kinds = [list(BEGINNINGS)[k % len(BEGINNINGS)] for k in range(num_half_open)]
    kept_s = await asyncio.gather(*(_kept_s(port, BEGINNINGS[kind]) for kind in kinds))
    longest_s: dict[str, float] = {}
    for kind, one_s in zip(kinds, kept_s, strict=True):
        longest_s[kind] = max(one_s, longest_s.get(kind, 0.0))
    return longest_s


async def _kept_s(port: int, begin: bytes) -> float:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begun_s = time.monotonic()
    writer.write(begin)
    await reader.read()
    writer.close()
    return time.monotonic() - begun_s


def table(rows: Sequence[Row]) -> list[list[str]]:
    lines = [
        ["half-open", *(f"{kind} kept s" for kind in BEGINNINGS), "error ms p50", "p99", "max"]
    ]
    for row in rows:
        error, kept_s = row["release_error_s"], row["kept_s"]
        kept = [f"{kept_s[kind]:.1f}" if kind in kept_s else "" for kind in BEGINNINGS]
        errors = [f"{error[name] * 1e3:.1f}" for name in ("p50", "p99", "max")]
        lines.append([str(row["num_half_open"]), *kept, *errors])
    return lines


BENCHMARK = Benchmark(
    name="half-open",
    title="256 paced streams beside half-open connections",
    definitions={
        "kept s": "from the connection's beginning until the gateway has closed it, the longest; "
        "10 s are given for a head, 30 s for a body",
        "error ms": "as for the streams of one gateway",
    },
    measure=measure,
    table=table,
)
