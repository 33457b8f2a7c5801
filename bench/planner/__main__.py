"""`python -m bench.planner [--instances N] [--out FILE]`: measure, print tables, write JSON."""

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
from bench.planner.rpc import added_by_grpc
from services.placement.patterns import PatternSpace

SEED = 2026
REQUESTS = (2, 4, 8, 16, 32, 64)
MODELS = ("8b-a5000", "13b-a100", "70b-tp4")  # 32, 40 and 80 layers
GROUPINGS = (1, 2, 4)
DEFINITIONS = {
    "gap": "objective / certified lower bound - 1, of the plan within the budget",
    "first": "the plan made without any search budget",
    "cpu_s": "process CPU time of one solve; the search budget is CPU time too",
    "wall_s": "wall time of the same solve on a machine shared with other work",
    "uniform_loss": "best even distance for all requests / plan - 1",
    "greedy_loss": "greedy offloading by copies per freed block / plan - 1",
    "proven": "share of instances with a proof that no pattern of the space is better",
    "instances": "tests/instances.py: realistic_instance",
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
    for part, rows in (
        ("exhaustive", _exhaustive(options.instances)),
        ("grpc", _grpc()),
        ("cells", _cells(options)),
    ):
        for row in rows:
            report.setdefault(part, []).append(row | {"load": os.getloadavg()[0]})
            _save(report, options.out)


def _save(report: dict[str, Any], path: Path | None) -> None:
    """Write what is there so far, so that a run that is cut short is not lost."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=300, help="per cell")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--groupings", type=int, nargs="+", default=GROUPINGS)
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS)
    return parser.parse_args()


def _exhaustive(instances: int) -> Iterator[dict[str, Any]]:
    print("complete search of even patterns against enumeration")
    print("model      R    n  largest difference  CPU ms p50/p99  wall ms p50/p99  nodes p50/max")
    for model in ("8b-a5000", "8b-h100", "13b-a100", "70b-tp4"):
        for num_requests in (2, 4):
            row = against_exhaustive(model, num_requests, instances, SEED)
            yield row
            cpu, wall, nodes = row["cpu_s"], row["wall_s"], row["nodes"]
            print(
                f"{model:9} {num_requests:2} {instances:4}  {row['max_difference']:18.1e}"
                f"  {cpu['p50'] * 1e3:6.2f}/{cpu['p99'] * 1e3:6.2f}"
                f"  {wall['p50'] * 1e3:7.2f}/{wall['p99'] * 1e3:6.2f}"
                f"  {nodes['p50']:6.0f}/{nodes['max']:.0f}",
                flush=True,
            )


def _cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    print(
        "\nL  F   R  space    n | first ms CPU p50/p99, wall p50, gap % p50/p90 |"
        " search ms CPU p50/p99, wall p50, gap % p50/p90, proven % | uniform, greedy mean loss %"
    )
    for grouping in options.groupings:
        for model in MODELS:
            for num_requests in options.requests:
                for space in PatternSpace:
                    cell = Cell(
                        hardware=model,
                        num_requests=num_requests,
                        layers_per_group=grouping,
                        space=space,
                        budget_s=search_budget_s(num_requests),
                    )
                    row = run_cell(cell, options.instances, SEED)
                    _print_cell(cell, row)
                    yield row


def _print_cell(cell: Cell, row: dict[str, Any]) -> None:
    def ms(name: str, quantile: str) -> str:
        return f"{row[name][quantile] * 1e3:.2f}"

    def percent(name: str, quantile: str) -> str:
        return f"{row[name][quantile] * 1e2:.3f}" if row[name]["count"] else "-"

    print(
        f"{cell.num_groups * cell.layers_per_group:2} {cell.layers_per_group:2} "
        f"{cell.num_requests:3}  {cell.space.value:5} {row['num_instances']:4} | "
        f"{ms('first_cpu_s', 'p50')}/{ms('first_cpu_s', 'p99')}, {ms('first_wall_s', 'p50')}, "
        f"{percent('first_gap', 'p50')}/{percent('first_gap', 'p90')} | "
        f"{ms('cpu_s', 'p50')}/{ms('cpu_s', 'p99')}, {ms('wall_s', 'p50')}, "
        f"{percent('gap', 'p50')}/{percent('gap', 'p90')}, {percent('proven', 'mean')} | "
        f"{percent('uniform_loss', 'mean')}, {percent('greedy_loss', 'mean')}",
        flush=True,
    )


def _grpc() -> Iterator[dict[str, Any]]:
    print("\nadded by gRPC, mean ms:  R    n    call    work   added")
    for num_requests in (4, 64):
        row = added_by_grpc(num_requests, 200)
        call, work, added = (row[f"{name}_mean_s"] * 1e3 for name in ("call", "work", "added"))
        print(
            f"{row['num_requests']:26} {row['num_calls']:4} {call:7.2f} {work:7.2f} {added:7.2f}",
            flush=True,
        )
        yield row


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
