"""One benchmark's file and section: JSON with commit, machine and definitions; Markdown."""

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One benchmark: what it measures, its definitions, and its table."""

    name: str
    title: str
    definitions: dict[str, str]  # of each column of `table` that is not plain
    measure: Callable[[], list[Row]]
    table: Callable[[Sequence[Row]], list[list[str]]]  # header first
    # A line for each bar that the figures are held against.
    verdicts: Callable[[Sequence[Row]], list[str]] = lambda rows: []


def document(benchmark: Benchmark, rows: list[Row], load: tuple[float, ...]) -> dict[str, Any]:
    """Return what is written as JSON. `load`: the load averages before the benchmark began."""
    return {
        "benchmark": benchmark.name,
        **circumstances(load),
        "definitions": benchmark.definitions,
        "rows": rows,
    }


def circumstances(load: tuple[float, ...]) -> dict[str, Any]:
    """Return commit and machine of figures. `load`: the load averages before they were made."""
    return {
        "commit": _output("git", "describe", "--always", "--dirty"),
        "machine": {
            "cpu": _cpu(),
            "num_cpus": os.cpu_count(),
            "python": platform.python_version(),
            "load_before": load,
            "load_after": os.getloadavg(),
        },
    }


def said(content: Mapping[str, Any]) -> str:
    """Say what `circumstances` has."""
    machine = content["machine"]
    before, after = machine["load_before"][0], machine["load_after"][0]
    return (
        f"{machine['cpu']}, {machine['num_cpus']} cores, Python {machine['python']}, commit "
        f"{content['commit']}, 1-minute load {before:.1f} before and {after:.1f} after."
    )


def save(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def markdown(benchmark: Benchmark, content: dict[str, Any]) -> str:
    """Return a benchmark's section: machine, table, definitions."""
    header, *rows = benchmark.table(content["rows"])
    lines = [
        f"### {benchmark.title}",
        "",
        said(content),
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        *(f"- **{line}**" for line in benchmark.verdicts(content["rows"])),
        *(f"- {name}: {text}" for name, text in content["definitions"].items()),
        "",
    ]
    return "\n".join(lines)


def measure_named(
    benchmarks: Mapping[str, Callable[[], Benchmark]], *, prefix: str, description: str | None
) -> None:
    """Measure what the command line names, or everything; write `prefix`-NAME.json, print Markdown.

    `benchmarks`: what gives each, called when its turn comes.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(benchmarks)}")
    parser.add_argument("--out", type=Path, default=Path(".cache/bench"), help="JSON goes here")
    options = parser.parse_args()
    if unknown := set(options.names) - benchmarks.keys():
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}")
    for name in options.names or benchmarks:
        benchmark = benchmarks[name]()
        load = os.getloadavg()
        content = document(benchmark, benchmark.measure(), load)
        save(content, options.out / f"{prefix}-{name}.json")
        print(markdown(benchmark, content), flush=True)


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
