"""Tables, JSON and a plot of all runs in a folder."""

import json
import os
import platform
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.e2e.bars import Bar, bar_chart
from bench.e2e.figures import (
    DEFINITIONS,
    Estimate,
    estimates,
    run_figures,
    why_not_counted,
)
from bench.e2e.records import RunRecord, as_stated
from bench.e2e.trace import READERS
from simulator.report.charts import svg

Kind = tuple[str, float, float]  # of readers: `READERS`, the share that leaves, SLO scale
PLOTTED = ("tbt", "tbt_deposit")
OF_RUNS = (
    "tokens_per_s", "read_tokens_per_s", "unread", "unmade", "effective_tokens_per_s", "qos",
    "requests_per_min", "pool", "offloaded", "held", "tokens_per_step",
    "mape", "mape_prompts", "controller", "failed",
)  # fmt: skip
# The table's columns: title and how a figure is written.
COLUMNS: Mapping[str, tuple[str, Callable[[Estimate], str]]] = {
    "tbt": ("TBT met", lambda e: _percent(e, interval=True)),
    "tbt_deposit": ("with deposit", lambda e: _percent(e, interval=True)),
    "tpot": ("TPOT met", lambda e: _percent(e, interval=True)),
    "tpot_deposit": ("with deposit", lambda e: _percent(e, interval=True)),
    "rebuffering": ("rebuffering", lambda e: _percent(e, interval=True)),
    "p95_s": ("P95, ms", lambda e: f"{e.value * 1e3:.0f}"),
    "p99_s": ("P99, ms", lambda e: f"{e.value * 1e3:.0f}"),
    "ttft_s": ("TTFT, s", lambda e: f"{e.value:.1f}"),
    "ttft_paced_s": ("of paced", lambda e: f"{e.value:.1f}"),
    "ttft_unpaced_s": ("of unpaced", lambda e: f"{e.value:.1f}"),
    "ttft_p50_s": ("P50", lambda e: f"{e.value:.1f}"),
    "ttft_p95_s": ("P95", lambda e: f"{e.value:.1f}"),
    "ttft_p99_s": ("P99", lambda e: f"{e.value:.1f}"),
    "e2e_s": ("E2E, s", lambda e: f"{e.value:.1f}"),
    "tokens_per_s": ("tokens/s", lambda e: f"{e.value:.1f}"),
    "read_tokens_per_s": ("read tokens/s", lambda e: f"{e.value:.1f}"),
    "unread": ("never read", lambda e: _percent(e)),
    "unmade": ("never made", lambda e: _percent(e)),
    "effective_tokens_per_s": ("effective", lambda e: f"{e.value:.1f}"),
    "qos": ("QoS", lambda e: f"{e.value:.1f}"),
    "pool": ("pool used", lambda e: _percent(e)),
    "offloaded": ("offloaded", lambda e: _percent(e)),
    "held": ("held", lambda e: f"{e.value:.2f}"),
    "tokens_per_step": ("tokens per step", lambda e: f"{e.value:.2f}"),
    "mape": ("MAPE", lambda e: _percent(e)),
    "mape_prompts": ("with prompts", lambda e: _percent(e)),
    "controller": ("controller", lambda e: _percent(e)),
}


def write_report(runs: Sequence[RunRecord], out: Path, *, link_ratio: float) -> str:
    """Write OUT.json, OUT.md and OUT.svg; return the tables. `link_ratio`: lambda."""
    rows = rows_of(runs)
    document = {
        "benchmark": "e2e",
        "commit": _output("git", "rev-parse", "HEAD"),
        "machine": {"cpu": platform.machine(), "num_cpus": os.cpu_count()},
        "definitions": DEFINITIONS,
        "lambda": link_ratio,
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    text = tables(rows, link_ratio)
    out.with_suffix(".md").write_text(text)
    out.with_suffix(".svg").write_text(plot(rows))
    return text


def rows_of(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return one row per system, SLO scale and kind of readers."""
    cells: dict[tuple[str, float, float, str], list[RunRecord]] = defaultdict(list)
    stated = {(run.key.readers, run.key.slo_scale) for run in runs if not run.key.leaving}
    for run in runs:
        key, own = run.key, (run.key.readers, run.key.slo_scale)
        for readers, scale in stated if key.is_of_all_scales else (own,):
            cell = readers, key.leaving, scale, key.label
            cells[cell].append(as_stated(run, scale, readers))
    rows = []
    for (readers, leaving, scale, system), members in sorted(cells.items()):
        wholes = [run_figures(run) for run in members]
        rows.append(
            {
                "system": system,
                "readers": readers,
                "leaving": leaving,
                "slo_scale": scale,
                "slo_s": members[0].slo_s,
                "seeds": sorted(run.key.seed for run in members),
                "num_requests": sum(len(run.requests) for run in members),
                "num_output_tokens": sum(len(r.generated_s) for m in members for r in m.requests),
                "not_counted_because": why_not_counted(members),
                **{
                    name: {"value": e.value, "low": e.low, "high": e.high}
                    for name, e in estimates(members).items()
                },
                **{
                    name: {
                        "value": statistics.fmean(values),
                        "low": min(values),
                        "high": max(values),
                    }
                    for name in OF_RUNS
                    if (values := [whole[name] for whole in wholes if name in whole])
                },
            }
        )
    return rows


def tables(rows: Sequence[dict[str, Any]], link_ratio: float) -> str:
    """Return one Markdown table per kind of readers and SLO scale, each with lambda."""
    parts = []
    for kind in sorted({_kind(row) for row in rows}):
        here = [row for row in rows if _kind(row) == kind]
        columns = {name: c for name, c in COLUMNS.items() if any(name in row for row in here)}
        slo_s, share = here[0]["slo_s"], 100 * link_ratio
        parts.append(f"## {_title(kind, slo_s)}, lambda {share:.0f} %\n")
        parts.append("| system | " + " | ".join(title for title, _ in columns.values()) + " |")
        parts.append("|---" * (len(columns) + 1) + "|")
        for row in here:
            mark = " (does not count)" if row["not_counted_because"] else ""
            cells = (
                write(Estimate(**row[name])) if name in row else "-"
                for name, (_, write) in columns.items()
            )
            parts.append(f"| {row['system']}{mark} | " + " | ".join(cells) + " |")
        parts.append("")
    reasons = sorted({reason for row in rows for reason in row["not_counted_because"]})
    if reasons:
        parts.append(f"Rows do not count because of: {', '.join(reasons)}.\n")
    parts.append(
        "In brackets: 95 % bootstrap intervals. The other figures' intervals and ranges over"
    )
    parts.append("seeds, and all definitions, are in the JSON beside this file.\n")
    return "\n".join(parts)


def _kind(row: Mapping[str, Any]) -> Kind:
    return row["readers"], row["leaving"], row["slo_scale"]


def _title(kind: Kind, slo_s: float) -> str:
    readers, leaving, scale = kind
    title = f"SLO {slo_s * 1e3:.1f} ms (base x {scale:g})"
    if readers != "paced":
        shares = ", ".join(f"{share:g}" if share else "none" for share in READERS[readers])
        title += f", {readers} readers (x {shares} in turn)"
    return title + (f", {leaving:.0%} of the readers leave" if leaving else "")


def _percent(figure: Estimate, *, interval: bool = False) -> str:
    value, low, high = (f"{100 * share:.1f}" for share in (figure.value, figure.low, figure.high))
    return f"{value} % ({low} to {high})" if interval else f"{value} %"


def plot(rows: Sequence[dict[str, Any]]) -> str:
    """Return tokens in time by system as an SVG document, a panel per readers and SLO scale."""
    panels: dict[str, dict[str, list[Bar]]] = defaultdict(dict)
    for row in rows:
        if all(name in row for name in PLOTTED):
            kind = "" if row["readers"] == "paced" else f", {row['readers']} readers"
            kind += f", {row['leaving']:.0%} leave" if row["leaving"] else ""
            title = f"base SLO x {row['slo_scale']:g}{kind}"
            panels[title][row["system"]] = [Bar(**row[name]) for name in PLOTTED]
    series = ("as generated", "with deposit")
    return svg(bar_chart(panels, series=series, y_label="tokens in time"))


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
