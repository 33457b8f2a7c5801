"""`python -m bench.planner [--quick | --page PAGE] [--out FILE]`: measure, print, write JSON.

`--quick` measures what has a bar in the design, in about a minute; all of it takes about six, and
only all of it goes into a page.
"""

import argparse
import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.document import add_page_option, circumstances, expect_tables, said, write_table
from bench.planner.cells import Cell, against_exhaustive, run_cell, search_budget_s
from bench.planner.plans import plan_times
from bench.planner.rpc import added_by_grpc
from bench.planner.tables import Row, Table, ms, percent
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
    options, load = _options(), os.getloadavg()
    gc.collect()
    gc.freeze()
    report = circumstances(load) | {"seed": SEED, "definitions": DEFINITIONS}
    for part, make in PARTS.items():
        if options.quick and part == "grpc":
            continue
        table = make(options)
        for row in table.printed():
            report.setdefault(part, []).append(row | {"load": os.getloadavg()[0]})
            _save(report, options.out)
        report |= circumstances(load)
        if options.page:
            write_table(options.page, part, report, table.cells)
    _save(report, options.out)
    print(f"\n{said(report)}")


def _save(report: dict[str, Any], path: Path | None) -> None:
    """Write what is there so far, so that a run that is cut short is not lost."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--quick", action="store_true", help="only what has a bar")
    add_page_option(either)
    parser.add_argument("--instances", type=int, default=300, help="per cell")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    expect_tables(options.page, PARTS, parser)
    return options


def _exhaustive(options: argparse.Namespace) -> Table:
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
    return Table(title, [*columns, "nodes p50 / max"], rows())


def _cells(options: argparse.Namespace) -> Table:
    def rows() -> Iterator[tuple[Row, list[str]]]:
        for cell in _bar_cells() if options.quick else _every_cell():
            row = run_cell(cell, options.instances, SEED)
            yield row, _cell_figures(cell, row)

    columns = ["L", "F", "R", "space", "first plan: CPU ms p50 / p99", "wall ms p50"]
    columns += ["gap % p50 / p90", "search: CPU ms p50 / p99", "wall ms p50", "gap % p50 / p90"]
    columns += ["proven %", "uniform, greedy: mean loss %"]
    return Table("First plan, and search within the budget:", columns, rows())


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


def _plans(options: argparse.Namespace) -> Table:
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
    return Table("Whole plans with 20 ms of CPU to search:", columns, rows())


def _grpc(options: argparse.Namespace) -> Table:
    def rows() -> Iterator[tuple[Row, list[str]]]:
        for num_requests in (4, 64):
            row = added_by_grpc(num_requests, 200)
            times = [f"{row[f'{name}_mean_s'] * 1e3:.2f}" for name in ("call", "work", "added")]
            yield row, [str(num_requests), str(row["num_calls"]), *times]

    columns = ["R", "calls", "call mean ms", "work mean ms", "added mean ms"]
    return Table("Added by gRPC (plans of 1 ms budget):", columns, rows())


PARTS = {"exhaustive": _exhaustive, "cells": _cells, "plans": _plans, "grpc": _grpc}

if __name__ == "__main__":
    sys.exit(main())
