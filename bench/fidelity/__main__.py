"""`python -m bench.fidelity`: how far the simulator is from runs of the real engine.

Reads finished runs of `bench.e2e`, one folder per device; `--make N` first makes the next N that
are missing of the wanted configurations, so that they can be made in pieces. A folder's resident
runs calibrate the machine and are not compared.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.e2e.records import RunKey, RunRecord, load_all
from bench.e2e.systems import SYSTEMS, Device
from bench.fidelity.comparison import BARS, DEFINITIONS, errors, missed
from bench.fidelity.machine import Calibration, calibrated
from bench.fidelity.replayed import RESIDENT_SYSTEM, complete, replayed

COMPARED = ("deepspeed", "flexgen-plus", "slo-aware", "dynamic-heuristic", "layerkv", "orbitflow")
SCALES = (1.0, 2.5)
LINKS = (150e6, 300e6)  # bytes/s
NUM_REQUESTS = 24  # of a run
SHOWN = ("step", "mean_step", "request_tpot", "ttft", "tbt", "tbt_deposit", "tpot", "tpot_deposit")


def main() -> None:
    options = _options()
    for link, system, scale in _missing(options.out)[: options.make]:
        _make(options.out, link, system, scale)
    rows: list[dict[str, Any]] = []
    calibrations = {}
    for link in options.links:
        folder = _folder(options.out, link) if options.runs is None else options.runs
        runs = load_all(folder / "runs") if (folder / "runs").exists() else []
        if found := compare(list(runs), Device(link_bytes_per_s=link)):
            calibrations[f"{link:g}"] = asdict(found[0])
            rows += [{"link_bytes_per_s": link, **row} for row in found[1]]
    document = {
        "definitions": DEFINITIONS, "bars": BARS, "calibrations": calibrations, "rows": rows,
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "fidelity.json").write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(calibrations))
    print(table(rows))


def compare(
    runs: list[RunRecord], device: Device
) -> tuple[Calibration, list[dict[str, Any]]] | None:
    """Return the calibration and one row per compared run; None without resident runs."""
    resident = [complete(run) for run in runs if run.key.system == RESIDENT_SYSTEM]
    if not resident:
        return None
    calibration = calibrated(device, resident)
    rows = []
    for run in runs:
        found = errors(complete(run), replayed(run, device, calibration))
        rows.append(
            {
                **asdict(run.key),
                "calibrates": run.key.system == RESIDENT_SYSTEM,
                "num_requests": len(complete(run).requests),
                "errors": found,
                "misses": missed(found),
            }
        )
    return calibration, rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table in percent, with the mean of what is compared below."""
    heads = ["link MB/s", "run", *SHOWN, "beyond its bar"]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        key = RunKey(system=row["system"], seed=row["seed"], slo_scale=row["slo_scale"])
        name = f"({key.name})" if row["calibrates"] else key.name
        values = [f"{100 * row['errors'][shown]:.1f}" for shown in SHOWN]
        link = f"{row['link_bytes_per_s'] / 1e6:g}"
        lines.append([link, name, *values, ", ".join(row["misses"]) or "-"])
    compared = [row["errors"] for row in rows if not row["calibrates"]]
    if compared:
        means = [fmean(abs(e[shown]) for e in compared) for shown in SHOWN]
        values = [f"{100 * mean:.1f}" for mean in means]
        lines.append(["", f"mean of {len(compared)}, without signs", *values, ""])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _folder(out: Path, link: float) -> Path:
    return out / f"link-{link / 1e6:g}"


def _missing(out: Path) -> list[tuple[float, str, float]]:
    """Return the wanted configurations that have no run, the calibrating ones first."""
    wanted = [(link, RESIDENT_SYSTEM, SCALES[0]) for link in LINKS]
    wanted += [(link, system, scale) for link in LINKS for scale in SCALES for system in COMPARED]

    def path(link: float, system: str, scale: float) -> Path:
        key = RunKey(system=system, seed=1, slo_scale=scale)
        return _folder(out, link) / "runs" / f"{key.name}.json"

    return [one for one in wanted if not path(*one).exists()]


def _make(out: Path, link: float, system: str, scale: float) -> None:
    """Let `bench.e2e` make one run; a system that is blind to SLOs gets one at every scale."""
    assert system in SYSTEMS
    subprocess.run(
        [
            sys.executable, "-m", "bench.e2e", "--out", str(_folder(out, link)),
            "--systems", system, "--scales", f"{scale:g}", "--seeds", "1",
            "--requests", str(NUM_REQUESTS), "--link-bytes-per-s", f"{link:g}",
        ],
        check=True,
    )  # fmt: skip


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".cache/bench/fidelity"))
    parser.add_argument("--make", type=int, default=0, help="missing runs to make first")
    parser.add_argument("--runs", type=Path, help="folder of bench.e2e to compare instead")
    parser.add_argument(
        "--links", nargs="+", type=float, default=list(LINKS), help="bytes/s of the device's link"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
