"""What it costs a gateway that its streams come from a hundred executors and not from one."""

from collections.abc import Sequence
from statistics import median

from bench.document import Benchmark, Row
from bench.gateway.streams import PATTERNS, measure_streams

NUM_STREAMS, NUM_EXECUTORS = 1_024, (1, 100)
REPEATS = 3
MAX_RATIO = 1.1  # bar: release error at p99, and CPU of a token
STAGGERED = PATTERNS[0]


def measure() -> list[Row]:
    """Measure in turn; return a row for each number of executors."""
    runs: dict[int, list[Row]] = {number: [] for number in NUM_EXECUTORS}
    for _ in range(REPEATS):
        for number, done in runs.items():
            done.append(measure_streams(STAGGERED, NUM_STREAMS, number))
    return [{"num_executors": number, "runs": done} for number, done in runs.items()]


def _p99_s(row: Row) -> float:
    return median(run["release_error_s"]["p99"] for run in row["runs"])


def _cpu_per_token_s(row: Row) -> float:
    return median(run["cpu_per_token_s"] for run in row["runs"])


def table(rows: Sequence[Row]) -> list[list[str]]:
    lines = [["executors", "error ms p50", "p99", "of each run", "CPU µs / token", "of each run"]]
    for row in rows:
        p99_ms = [f"{run['release_error_s']['p99'] * 1e3:.1f}" for run in row["runs"]]
        cpu_us = [f"{run['cpu_per_token_s'] * 1e6:.1f}" for run in row["runs"]]
        p50_s = median(run["release_error_s"]["p50"] for run in row["runs"])
        lines.append(
            [
                str(row["num_executors"]),
                f"{p50_s * 1e3:.1f}",
                f"{_p99_s(row) * 1e3:.1f}",
                ", ".join(p99_ms),
                f"{_cpu_per_token_s(row) * 1e6:.1f}",
                ", ".join(cpu_us),
            ]
        )
    return lines


def verdicts(rows: Sequence[Row]) -> list[str]:
    one, many = rows
    pairs = {"error at p99": _p99_s, "CPU of a token": _cpu_per_token_s}
    return [
        f"{name}, {many['num_executors']} executors by one: {of(many) / of(one):.2f} "
        f"(bar: {MAX_RATIO}, {'met' if of(many) <= MAX_RATIO * of(one) else 'MISSED'})"
        for name, of in pairs.items()
    ]


BENCHMARK = Benchmark(
    name="fleet",
    title=f"{NUM_STREAMS:,} streams of one gateway, of one executor and of a hundred",
    definitions={
        "executors": "without engines, in one process; streams, generation and figures are those "
        "of `streams`, staggered, medians of runs in turn",
    },
    measure=measure,
    table=table,
    verdicts=verdicts,
)
