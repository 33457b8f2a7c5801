"""`python -m bench.gpu --model DIR [--out FILE]`: measure on a GPU, print tables, write JSON.

Every cell runs in a process of its own: the device is empty when it starts, and what one engine
leaves behind does not touch the next.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu.cell import RESULT
from bench.gpu.engine import Cell, as_json

PARTS = ("link", "exactness", "cost", "overlap")
BATCHES = [1, 8, 32]
LAYERS_PER_GROUP = (1, 4, 8)
CELL_TIMEOUT_S = 1_800
DEFINITIONS = {
    "link_share": "rate of the engine on 1 GiB of scattered blocks / one plain pinned copy",
    "identical": "greedy tokens equal to stock vLLM's, both with VLLM_BATCH_INVARIANT=1",
    "step_s": "median wall time of a decode step of the whole batch",
    "cost_frac": "step_s / step_s of stock vLLM with the named graphs - 1; nothing is offloaded",
    "ideal_s": "max(step_s with everything resident, bytes of a step / rate of a plain copy)",
    "stall_s": "seconds that the compute stream waited for copies, sum of the run",
}


def main() -> None:
    options = _options()
    report: dict[str, Any] = {
        "commit": _output("git", "rev-parse", "HEAD"),
        "machine": _output(
            "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
        ),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": options.model,
        "definitions": DEFINITIONS,
    }
    parts = {"link": link, "exactness": exactness, "cost": cost, "overlap": overlap}
    for name in options.parts:
        rows = parts[name](options, report)
        report[name] = rows
        print_table(name, rows)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")


def link(options: argparse.Namespace, report: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = run_cell({"kind": "link"})["rows"]
    return rows


def exactness(options: argparse.Namespace, report: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare tokens with stock vLLM's, in a pool that holds a part of what they need."""
    expected = run_cell(_cell(options, kind="tokens"), invariant=True)["tokens"]
    rows = []
    for kv in ({}, {"host_memory": "ring"}, {"layers_per_group": 4}):
        for placement in ("every:1", "every:2", "churn:1", "churn:2"):
            for graphs in ("piecewise", "none"):
                cell = _cell(
                    options,
                    kind="tokens",
                    kv={"host_bytes": options.host_bytes, **kv},
                    placement=placement,
                    graphs=graphs,
                    pool_tokens=1_280,
                    max_model_len=1_024,
                )
                result = run_cell(cell, invariant=True)
                tokens = result.pop("tokens")
                row = {**kv, "placement": placement, "graphs": graphs}
                rows.append({**row, "identical": tokens == expected, **result})
    return rows


def cost(options: argparse.Namespace, report: dict[str, Any]) -> list[dict[str, Any]]:
    """Time decode steps while nothing is offloaded."""
    stock = {
        graphs: _steps(_cell(options, kind="decode", graphs=graphs, batches=BATCHES))
        for graphs in ("full", "piecewise")
    }
    rows = []
    for layers_per_group in LAYERS_PER_GROUP:
        kv = {"host_bytes": options.host_bytes, "layers_per_group": layers_per_group}
        steps_s = _steps(_cell(options, kind="decode", kv=kv, batches=BATCHES))
        rows.extend(
            {
                "layers_per_group": layers_per_group,
                "batch": batch,
                "step_s": step_s,
                **{f"stock_{graphs}_s": by_batch[batch] for graphs, by_batch in stock.items()},
                **{f"cost_frac_{g}": step_s / by[batch] - 1 for g, by in stock.items()},
            }
            for batch, step_s in steps_s.items()
        )
    return rows


def overlap(options: argparse.Namespace, report: dict[str, Any]) -> list[dict[str, Any]]:
    """Time decode steps with layers on the host against the longer of computing and copying."""
    link_rows = report.get("link") or link(options, report)
    bytes_per_s = max(r["plain_bytes_per_s"] for r in link_rows if r["direction"] == "h2d")
    rows = []
    for host_memory in ("pinned", "ring"):
        kv = {"host_bytes": options.host_bytes, "host_memory": host_memory}
        shape = {"kind": "decode", "kv": kv, "batches": [4], "num_prompt_tokens": 4_000}
        resident_s = _steps(_cell(options, **shape))[4]
        for placement in ("every:1", "every:2", "every:4", "every:8"):
            for num_staging in (1, 2):
                cell = _cell(options, **shape, placement=placement, num_staging=num_staging)
                row = run_cell(cell)["rows"][0]
                ideal_s = max(resident_s, row["h2d_bytes"] / row["num_steps"] / bytes_per_s)
                rows.append(
                    {
                        "host_memory": host_memory,
                        "placement": placement,
                        "num_staging": num_staging,
                        "resident_s": resident_s,
                        "ideal_s": ideal_s,
                        "ratio": row["step_s"] / ideal_s,
                        **row,
                    }
                )
    return rows


def _cell(options: argparse.Namespace, **fields: Any) -> dict[str, Any]:
    return as_json(Cell(model=options.model, load_format=options.load_format, **fields))


def _steps(cell: dict[str, Any]) -> dict[int, float]:
    return {row["batch"]: row["step_s"] for row in run_cell(cell)["rows"]}


def run_cell(cell: dict[str, Any], *, invariant: bool = False) -> dict[str, Any]:
    """Run a cell in a process of its own; RuntimeError with its last lines if it fails."""
    environment = {**os.environ, "VLLM_BATCH_INVARIANT": str(int(invariant))}
    run = subprocess.run(
        [sys.executable, "-m", "bench.gpu.cell", json.dumps(cell)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=CELL_TIMEOUT_S,
        check=False,
    )
    results = [line for line in run.stdout.splitlines() if line.startswith(RESULT)]
    if run.returncode or not results:
        raise RuntimeError(f"{cell} ended with {run.returncode}:\n{run.stderr[-4_000:]}")
    found: dict[str, Any] = json.loads(results[-1].removeprefix(RESULT))
    return found


def print_table(name: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{name}")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, *([_text(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(columns))]
    for line in lines:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--model", required=True, help="directory or hub id")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--host-bytes", type=int, default=16 << 30)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


if __name__ == "__main__":
    main()
