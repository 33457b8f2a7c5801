"""`python -m bench.gpu [--device cpu] [--only PART/NAME …] [--budget-s S]`: measure, cell by cell.

Each cell is a process of its own with a time limit: the device is empty when it starts, and what
one leaves behind does not touch the next. Its result is a line of JSON in `--out`; what is there
already, of the same commit, is not run again, so that a run that was cut off goes on.
"""

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.cell import RESULT
from bench.gpu.cells import DEVICE_PARTS, PARTS, Cell, device_cells, engine_cells
from bench.gpu.tables import print_tables

DEFAULT_OUT = Path(".cache/bench/gpu.jsonl")
MIN_CELL_S = 5.0  # of the budget; with less left none is begun


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    commit = _commit()
    done = read(options.out, commit)
    if not options.print:
        cells = [cell for cell in _cells(options) if cell.id not in done]
        left = run_all(cells, options, commit, run_cell)
        print(f"{len(cells) - left} cells run, {left} left", flush=True)
    print_tables(read(options.out, commit))


def run_all(
    cells: Sequence[Cell],
    options: argparse.Namespace,
    commit: str,
    run: Callable[[Cell, float], dict[str, Any]],
) -> int:
    """Run cells while the budget lasts, and write each one's line; return how many are left."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + options.budget_s
    for number, cell in enumerate(cells):
        left_s = end_s - time.monotonic()
        if left_s < MIN_CELL_S:
            return len(cells) - number
        started, begin_s = time.gmtime(), time.monotonic()
        print(f"[{number + 1}/{len(cells)}] {cell.id}", flush=True)
        found = run(cell, min(options.cell_timeout_s, left_s))
        line = {
            "cell": cell.id,
            "commit": commit,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", started),
            "wall_s": round(time.monotonic() - begin_s, 3),
            **found,
        }
        if "error" in found:
            print(f"    {found['error'].splitlines()[-1]}", flush=True)
        with options.out.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
    return 0


def run_cell(cell: Cell, timeout_s: float) -> dict[str, Any]:
    """Run a cell in a process of its own; return its result, or how it ended."""
    try:
        run = subprocess.run(
            [sys.executable, "-m", "bench.gpu.cell", json.dumps(cell.as_json())],
            capture_output=True,
            text=True,
            env={**os.environ, **cell.environment},
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout_s:.0f} s"}
    results = [line for line in run.stdout.splitlines() if line.startswith(RESULT)]
    if run.returncode or not results:
        return {"error": f"ended with {run.returncode}:\n{run.stderr[-4_000:].strip()}"}
    found: dict[str, Any] = json.loads(results[-1].removeprefix(RESULT))
    return found


def read(path: Path, commit: str) -> dict[str, dict[str, Any]]:
    """Return the newest result of each cell of a commit; cells that failed have none."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["cell"]: line for line in lines if line["commit"] == commit and "rows" in line}


def _cells(options: argparse.Namespace) -> list[Cell]:
    cells = device_cells(options.device)
    if set(options.parts) - set(DEVICE_PARTS):
        cells += engine_cells(options.device, options.model)
    return [
        cell
        for cell in cells
        if cell.part in options.parts
        and any(fnmatch.fnmatch(cell.id, pattern) for pattern in options.only)
    ]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--only", nargs="+", default=["*"], help="cells by pattern, as link/*")
    parser.add_argument("--model", default="", help="of cost and overlap; empty: a made-up one")
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    parser.add_argument("--cell-timeout-s", type=float, default=600.0)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--print", action="store_true", help="only print what was measured")
    return parser.parse_args(arguments)


def _commit() -> str:
    """Return the commit, or nothing where there is no repository."""
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return run.stdout.strip()


if __name__ == "__main__":
    main()
