"""`python -m bench.planner [--quick] [--out FILE]`: measure, print markdown tables, write JSON.

`--quick` measures what has a bar in the design, in about a minute; all of it takes about six.
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.planner.cells import Cell, against_exhaustive, run_cell, search_budget_s
from bench.planner.plans import plan_times
from bench.planner.rpc import added_by_grpc
from bench.planner.tables import Row, ms, percent, printed
from services.placement.step_time.patterns import PatternSpace

SEED = 2026
REQUESTS = (2, 4, 8, 16, 32, 64)
MODELS = ("8b-a5000", "13b-a100", "70b-tp4")  # 32, 40 and 80 layers
GROUPINGS = (1, 2, 4)
EXHAUSTIVE = tuple(
    (model, count) for model in ("8b-a5000", "8b-h100", "13b-a100", "70b-tp4") for count in (2, 4)
)
BAR_EXHAUSTIVE = (("8b-a5000", 4), ("8b-h100", 4))
BAR_CELL = ("70b-tp4", 64)  # 80 layers
DEFINITIONS = {
    "gap": "objective / certified lower bound - 1, of the plan within the budget",
    "first": "the plan made without any search budget",
    "cpu_s": "process CPU time of one solve; the search budget is CPU time too",
    "wall_s": "wall time of the same solve on a machine shared with other work",
    "uniform_loss": "best even distance for all requests / plan - 1",
    "greedy_loss": "greedy offloading by copies per freed block / plan - 1",
    "proven": "share of instances with a proof that no pattern of the space is better",
    "instances": "lab/planning/instances.py: realistic_instance",
    "plans": "bench/planner/plans.py: whole plans of 1K-12K contexts, room for 50-90 % of them",
}


def main() -> None:
    options = _options()
    gc.collect()
    gc.freeze()
    report: dict[str, Any] = {
        "commit": _commit(),
        "machine": f"{platform.machine()}, {platform.python_version()}, {_cpu()}",
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seed": SEED,
        "definitions": DEFINITIONS,
    }
    print(f"commit {report['commit']}, {report['machine']}, load {os.getloadavg()[0]:.1f} at start")
    parts = [("exhaustive", _exhaustive(options)), ("cells", _cells(options))]
    parts += [("plans", _plans(options))]
    parts += [] if options.quick else [("grpc", _grpc())]
    for part, rows in parts:
        for row in rows:
            report.setdefault(part, []).append(row | {"load": os.getloadavg()[0]})
            _save(report, options.out)
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")


def _save(report: dict[str, Any], path: Path | None) -> None:
    """Write what is there so far, so that a run that is cut short is not lost."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only what has a bar")
    parser.add_argument("--instances", type=int, default=300, help="per cell")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser.parse_args()


def _exhaustive(options: argparse.Namespace) -> Iterator[Row]:
    def rows() -> Iterator[tuple[Row, list[str]]]:
        for model, num_requests in BAR_EXHAUSTIVE if options.quick else EXHAUSTIVE:
            row = against_exhaustive(model, num_requests, options.instances, SEED)
            nodes = f"{row['nodes']['p50']:.0f} / {row['nodes']['max']:.0f}"
            yield (
                row,
                [
                    model,
                    str(num_requests),
                    f"{row['max_difference']:.1e}",
                    ms(row["cpu_s"], "p50", "p99"),
                    ms(row["wall_s"], "p50", "p99"),
                    nodes,
                ],
            )

    title = "Complete search of even patterns against enumeration of all of them:"
    columns = ["model", "R", "largest difference", "CPU ms p50 / p99", "wall ms p50 / p99"]
    return printed(title, [*columns, "nodes p50 / max"], rows())


def _cells(options: argparse.Namespace) -> Iterator[Row]:
    def rows() -> Iterator[tuple[Row, list[str]]]:
        for cell in _bar_cells() if options.quick else _every_cell():
            row = run_cell(cell, options.instances, SEED)
            yield row, _cell_figures(cell, row)

    columns = ["L", "F", "R", "space", "first plan: CPU ms p50 / p99", "wall ms p50"]
    columns += ["gap % p50 / p90", "search: CPU ms p50 / p99", "wall ms p50", "gap % p50 / p90"]
    columns += ["proven %", "uniform, greedy: mean loss %"]
    return printed("First plan, and search within the budget:", columns, rows())


def _every_cell() -> Iterator[Cell]:
    for grouping in GROUPINGS:
        for model in MODELS:
            for num_requests in REQUESTS:
                for space in PatternSpace:
                    yield _cell(model, num_requests, grouping, space)


def _bar_cells() -> Iterator[Cell]:
    for space in PatternSpace:
        yield _cell(*BAR_CELL, 1, space)


def _cell(model: str, num_requests: int, grouping: int, space: PatternSpace) -> Cell:
    return Cell(
        hardware=model,
        num_requests=num_requests,
        layers_per_group=grouping,
        space=space,
        budget_s=search_budget_s(num_requests),
    )


def _cell_figures(cell: Cell, row: Row) -> list[str]:
    layers = cell.num_groups * cell.layers_per_group
    return [
        str(layers),
        str(cell.layers_per_group),
        str(cell.num_requests),
        cell.space.value,
        ms(row["first_cpu_s"], "p50", "p99"),
        ms(row["first_wall_s"], "p50"),
        percent(row["first_gap"], "p50", "p90"),
        ms(row["cpu_s"], "p50", "p99"),
        ms(row["wall_s"], "p50"),
        percent(row["gap"], "p50", "p90"),
        percent(row["proven"], "mean", digits=0),
        f"{percent(row['uniform_loss'], 'mean', digits=0)}, "
        f"{percent(row['greedy_loss'], 'mean', digits=0)}",
    ]


def _plans(options: argparse.Namespace) -> Iterator[Row]:
    def rows() -> Iterator[tuple[Row, list[str]]]:
        for num_layers in (32, 80):
            for row in plan_times(num_layers, 64, options.instances // 3, SEED):
                yield (
                    row,
                    [
                        str(num_layers),
                        str(row["num_requests"]),
                        row["slo"],
                        ms(row["cpu_s"], "p50", "p99"),
                        ms(row["wall_s"], "p50"),
                        f"{row['paused']['mean']:.1f}",
                        percent(row["undecided"], "mean", digits=0),
                    ],
                )

    columns = ["L", "R", "SLO", "CPU ms p50 / p99", "wall ms p50", "paused, mean", "undecided %"]
    return printed("Whole plans with 20 ms of CPU to search:", columns, rows())


def _grpc() -> Iterator[Row]:
    def rows() -> Iterator[tuple[Row, list[str]]]:
        for num_requests in (4, 64):
            row = added_by_grpc(num_requests, 200)
            times = [f"{row[f'{name}_mean_s'] * 1e3:.2f}" for name in ("call", "work", "added")]
            yield row, [str(num_requests), str(row["num_calls"]), *times]

    columns = ["R", "calls", "call mean ms", "work mean ms", "added mean ms"]
    return printed("Added by gRPC (plans of 1 ms budget):", columns, rows())


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown CPU"


if __name__ == "__main__":
    sys.exit(main())
