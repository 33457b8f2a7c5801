"""What it costs a gateway that its streams come from a hundred executors and not from one."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from bench.document import Benchmark, Row
from bench.gateway.streams import PATTERNS, measure_streams

NUM_STREAMS, NUM_EXECUTORS = 1_024, (1, 100)
REPEATS = 3
MAX_RATIO = 1.1  # bar: release error at p99, and CPU of a token
AHEAD = replace(PATTERNS[0], num_ahead=2)  # a second of reading in hand


def measure() -> list[Row]:
    """Measure in turn; return a row for each number of executors."""
    runs: dict[int, list[Row]] = {number: [] for number in NUM_EXECUTORS}
    for _ in range(REPEATS):
        for number, done in runs.items():
            done.append(measure_streams(AHEAD, NUM_STREAMS, number))
    return [{"num_executors": number, "runs": done} for number, done in runs.items()]


def _errors_s(row: Row, quantile: str) -> list[float]:
    return [run["release_error_s"][quantile] for run in row["runs"]]


def _cpu_per_token_s(row: Row) -> list[float]:
    return [run["cpu_per_token_s"] for run in row["runs"]]


def table(rows: Sequence[Row]) -> list[list[str]]:
    lines = [["executors", "error ms p50", "p99", "of each run", "CPU µs / token", "of each run"]]
    for row in rows:
        p99_s, cpu_s = _errors_s(row, "p99"), _cpu_per_token_s(row)
        lines.append(
            [
                str(row["num_executors"]),
                f"{median(_errors_s(row, 'p50')) * 1e3:.1f}",
                f"{median(p99_s) * 1e3:.1f}",
                ", ".join(f"{one * 1e3:.1f}" for one in p99_s),
                f"{median(cpu_s) * 1e6:.1f}",
                ", ".join(f"{one * 1e6:.1f}" for one in cpu_s),
            ]
        )
    return lines


def verdicts(rows: Sequence[Row]) -> list[str]:
    one, many = rows
    ratios = {
        "error at p99": median(_errors_s(many, "p99")) / median(_errors_s(one, "p99")),
        "CPU of a token": median(_cpu_per_token_s(many)) / median(_cpu_per_token_s(one)),
    }
    return [
        f"{name}, {many['num_executors']} executors by one: {ratio:.2f} "
        f"(bar: {MAX_RATIO}, {'met' if ratio <= MAX_RATIO else 'MISSED'})"
        for name, ratio in ratios.items()
    ]


BENCHMARK = Benchmark(
    name="fleet",
    title=f"{NUM_STREAMS:,} streams of one gateway, of one executor and of a hundred",
    definitions={
        "executors": "without engines, in one process, with the frames and beats of real ones; "
        "streams and figures are those of `streams`, staggered, each with a second of reading in "
        "hand from its start on, medians of runs in turn",
    },
    measure=measure,
    table=table,
    verdicts=verdicts,
)
