"""One benchmark's file and section: JSON with commit, machine and definitions; Markdown."""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Return how figures were made, once they are. `load`: the load averages before that."""
    return {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
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
        f"`{content['command']}`, commit {content['commit']}, {content['date']}, {machine['cpu']}, "
        f"{machine['num_cpus']} cores, Python {machine['python']}, 1-minute load {before:.1f} "
        f"before and {after:.1f} after."
    )


def save(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def markdown(benchmark: Benchmark, content: dict[str, Any]) -> str:
    """Return a benchmark's section: how it was made, table, definitions."""
    lines = [
        f"### {benchmark.title}",
        "",
        said(content),
        "",
        *table_lines(benchmark.table(content["rows"])),
        "",
        *(f"- **{line}**" for line in benchmark.verdicts(content["rows"])),
        *(f"- {name}: {text}" for name, text in content["definitions"].items()),
        "",
    ]
    return "\n".join(lines)


def table_lines(table: Sequence[Sequence[str]]) -> list[str]:
    """Return a table, its header first, as lines of Markdown."""
    header, *rows = ("| " + " | ".join(row) + " |" for row in table)
    return [header, "|" + "---|" * len(table[0]), *rows]


def write_table(
    page: Path, name: str, content: Mapping[str, Any], table: Sequence[Sequence[str]]
) -> None:
    """Write a table and how it was made into a page, in place of what its markers enclose.

    `content`: has what `circumstances` has. `table`: header first.

    Raises:
        LookupError: as `around_table`.
    """
    before, after = around_table(page, name)
    page.write_text("\n".join([before, said(content), "", *table_lines(table), after]))


def around_table(page: Path, name: str) -> tuple[str, str]:
    """Return a page up to a table's first marker and from its last one on, markers included.

    Raises:
        LookupError: the page has no `<!-- table NAME -->` with an `<!-- end -->` of its own.
    """
    first, last = f"<!-- table {name} -->", "<!-- end -->"
    before, _, behind = page.read_text().partition(first)
    between, ended, after = behind.partition(last)
    if not ended or "<!-- table " in between:
        raise LookupError(f"{page} has no table between {first} and {last}")
    return before + first, last + after


def add_page_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--page", type=Path, help="of docs: each table goes between its markers there"
    )


def expect_tables(page: Path | None, names: Iterable[str], parser: argparse.ArgumentParser) -> None:
    """End with an error, before anything is measured, where a page lacks the markers of a name."""
    try:
        for name in names if page else ():
            around_table(page, name)
    except (LookupError, OSError) as error:
        parser.error(str(error))


def measure_named(
    benchmarks: Mapping[str, Callable[[], Benchmark]], *, prefix: str, description: str | None
) -> None:
    """Measure what the command line names, or everything; write `prefix`-NAME.json, print Markdown.

    `benchmarks`: what gives each, called when its turn comes.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(benchmarks)}")
    parser.add_argument("--out", type=Path, default=Path(".cache/bench"), help="JSON goes here")
    add_page_option(parser)
    options = parser.parse_args()
    if unknown := set(options.names) - benchmarks.keys():
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}")
    names = options.names or list(benchmarks)
    expect_tables(options.page, names, parser)
    for name in names:
        benchmark = benchmarks[name]()
        load = os.getloadavg()
        content = document(benchmark, benchmark.measure(), load)
        save(content, options.out / f"{prefix}-{name}.json")
        print(markdown(benchmark, content), flush=True)
        if options.page:
            write_table(options.page, name, content, benchmark.table(content["rows"]))


def _commit() -> str:
    """Return the commit, and whether code is otherwise: the pages of docs/ change no figure."""
    commit = _output("git", "rev-parse", "--short", "HEAD")
    code = ("--", ":/", ":(top,exclude)docs")
    changes = _output("git", "status", "--porcelain", "--untracked-files=no", *code)
    return f"{commit} with changes" if changes else commit


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
