"""How precisely one gateway process on one core releases the tokens of many streams."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import httpx
import psutil

from bench.document import Benchmark, Row
from bench.gateway.processes import cpu_s, running, wait_until
from bench.gateway.schedule import Schedule
from lab.stack.metrics import sums_by_name
from lab.stack.ports import free_port

INTERVAL_S = 0.05  # 20 tokens per second and reader
SECONDS = 10
GATEWAY_CORE, OTHER_CORE = 0, 1


@dataclass(frozen=True, slots=True)
class Pattern:
    """How an executor generates, and for how many streams."""

    name: str
    burst: int  # tokens of a stream together
    staggered: bool  # one stream after the other
    speedup: float  # of generation over reading
    num_streams: tuple[int, ...]
    num_ahead: int = 0  # as in `Schedule`


PATTERNS = (
    Pattern("staggered", 10, True, 1.1, (256, 512, 768, 1_024)),
    Pattern("all in one frame", 1, False, 1.0, (256, 1_024)),
)


def measure() -> list[Row]:
    return [
        _measure(pattern, num_streams)
        for pattern in PATTERNS
        for num_streams in pattern.num_streams
    ]


def _measure(pattern: Pattern, num_streams: int) -> Row:
    return {"pattern": pattern.name, **measure_streams(pattern, num_streams)}


def measure_streams(pattern: Pattern, num_streams: int, num_executors: int = 1) -> Row:
    """Return release errors, and what the gateway takes of processor and memory."""
    schedule = Schedule(
        num_streams=num_streams,
        interval_s=INTERVAL_S,
        burst=pattern.burst,
        staggered=pattern.staggered,
        speedup=pattern.speedup,
        num_bursts=int(SECONDS / INTERVAL_S / pattern.burst),
        num_ahead=pattern.num_ahead,
    )
    with streams_read(schedule, num_executors) as reading:
        before_s, open_bytes = cpu_s([reading.gateway]), reading.gateway.memory_info().rss
        errors = reading.errors_s()
        used_s = cpu_s([reading.gateway]) - before_s
    return {
        "num_streams": num_streams,
        "release_error_s": errors,
        "cpu_per_token_s": used_s / (num_streams * schedule.num_tokens),
        "cpu_frac": used_s / SECONDS,
        "bytes_per_stream": (open_bytes - reading.before_bytes) / num_streams,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A gateway whose streams are all open and being read."""

    port: int
    gateway: psutil.Process
    before_bytes: int  # of its resident memory, before the first stream
    readers: "subprocess.Popen[str]"

    def errors_s(self) -> dict[str, float]:
        """Wait for the streams' end; return the quantiles of the release error."""
        errors_s: dict[str, float] = json.loads(line_of(self.readers))
        return errors_s


@contextmanager
def streams_read(schedule: Schedule, num_executors: int = 1) -> Iterator[Reading]:
    """Run executors, a gateway on a core of its own, and readers; begin with the first token."""
    text = json.dumps(asdict(schedule))
    executor_ports = [free_port() for _ in range(num_executors)]
    port, metrics_port = free_port(), free_port()
    num_streams = schedule.num_streams
    settings = gateway_settings(port, executor_ports, num_streams, metrics_port=metrics_port)
    arguments = ",".join(map(str, executor_ports)), text
    with (
        running("bench.gateway.synthetic_executor", *arguments, cores=[OTHER_CORE]) as executor,
        running("services.gateway", settings=settings, cores=[GATEWAY_CORE]) as front,
    ):
        wait_until(lambda: num_connected(metrics_port) == num_executors, "all executors")
        gateway = psutil.Process(front.pid)
        before_bytes = gateway.memory_info().rss
        with running("bench.gateway.sse_readers", str(port), text, cores=[OTHER_CORE]) as readers:
            expect(readers, "open")
            expect(executor, "generating")
            yield Reading(port=port, gateway=gateway, before_bytes=before_bytes, readers=readers)


def gateway_settings(
    port: int, executor_ports: Sequence[int], max_streams: int, *, metrics_port: int = 0
) -> dict[str, object]:
    """Return a gateway's settings for streams of executors here, without a tracker."""
    return {
        "EVENFLOW_GATEWAY_HTTP_PORT": port,
        "EVENFLOW_GATEWAY_GRPC_PORT": 0,
        "EVENFLOW_GATEWAY_METRICS_PORT": metrics_port,
        "EVENFLOW_GATEWAY_EXECUTORS": ",".join(f"127.0.0.1:{one}" for one in executor_ports),
        "EVENFLOW_GATEWAY_TRACKER": "",
        "EVENFLOW_GATEWAY_MAX_LIVE_REQUESTS": max_streams,
        "EVENFLOW_GATEWAY_LOG_LEVEL": "warning",
        "EVENFLOW_GATEWAY_DRAIN_TIMEOUT_S": 0,
    }


def is_ready(port: int) -> bool:
    """Say whether the gateway there takes requests."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def num_connected(metrics_port: int) -> int:
    """Return to how many executors the gateway there is connected."""
    try:
        page = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", timeout=5).text
    except httpx.HTTPError:
        return 0
    return int(sums_by_name(page).get("evenflow_gateway_executor_connected", 0))


def line_of(process: "subprocess.Popen[str]") -> str:
    """Return the next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def expect(process: "subprocess.Popen[str]", word: str) -> None:
    """Wait for a line. Raises RuntimeError for another one."""
    line = line_of(process)
    if line != word:
        raise RuntimeError(f'"{line}" instead of "{word}"')


def table(rows: Sequence[Row]) -> list[list[str]]:
    header = ["streams", "generation", "error ms p50", "p99", "p99.9", "max"]
    lines = [[*header, "CPU µs / token", "core %", "KiB / stream"]]
    for row in rows:
        error = row["release_error_s"]
        lines.append(
            [
                str(row["num_streams"]),
                row["pattern"],
                *(f"{error[name] * 1e3:.1f}" for name in ("p50", "p99", "p999", "max")),
                f"{row['cpu_per_token_s'] * 1e6:.0f}",
                f"{row['cpu_frac'] * 1e2:.0f}",
                f"{row['bytes_per_stream'] / 1024:.0f}",
            ]
        )
    return lines


BENCHMARK = Benchmark(
    name="streams",
    title="Streams of one gateway on one core",
    definitions={
        "generation": "staggered: each stream's turn is its own, and it gets ten tokens at once, a "
        "tenth faster than they are read, in frames at least 10 ms apart, so that they wait in "
        "the gateway; all in one frame: a token of every stream every 50 ms",
        "error ms": "a token's receipt by the reader less its due time, by the rule of "
        "services/pacing/deposit.py from the times at which the executor made its frames; the "
        "first fifth of each stream is left out",
        "CPU": "of the gateway's process, from the first token to the last",
        "KiB / stream": "resident memory with all streams open, before the first token, less that "
        "before the first stream",
    },
    measure=measure,
    table=table,
)
