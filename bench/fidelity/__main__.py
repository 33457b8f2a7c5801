"""`python -m bench.fidelity`: how far the simulator is from runs of the real engine.

Reads the finished runs of a folder of `bench.e2e`. Some runs of one seed calibrate the machine;
runs of the other seeds are held out: nothing was fitted to them.
"""

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean, median

from bench.document import Benchmark, Row, document, markdown, save
from bench.e2e.records import RunKey, RunRecord, load_all
from bench.e2e.systems import Device
from bench.fidelity.comparison import BARS, DEFINITIONS, errors, missed
from bench.fidelity.copying import Map, with_copies
from bench.fidelity.machine import Calibration, calibrated
from bench.fidelity.replayed import RESIDENT_SYSTEM, complete, replayed

CALIBRATION_SEED = 1  # runs of other seeds are held out
# Whose copies are fitted: many, few, in one buffer and in two; no request pauses.
COPYING_SYSTEMS = ("deepspeed", "dynamic-heuristic", "flexgen-plus", "request-wise")
NUM_SEEDS = 5  # of the noise: a simulated run is one draw, as a real one is
SHOWN = ("step", "mean_step", "request_tpot", "ttft", "tbt", "tbt_deposit", "tpot", "tpot_deposit")


def main() -> None:
    options = _options()
    load, device = os.getloadavg(), Device(link_bytes_per_s=options.link_bytes_per_s)
    runs = [run for run in load_all(options.runs / "runs") if run.key.readers == "paced"]
    with ProcessPoolExecutor(options.jobs) as pool:
        calibration = calibrate(runs, device, over=pool.map)
        rows = list(pool.map(partial(compare, device=device, calibration=calibration), runs))
    benchmark = Benchmark(
        name="fidelity",
        title="The simulator beside the engine",
        definitions=DEFINITIONS,
        measure=lambda: rows,
        table=table,
    )
    content = document(benchmark, rows, load)
    content |= {"bars": BARS, "device": asdict(device), "calibration": asdict(calibration)}
    save(content, options.out)
    print(markdown(benchmark, content))


def calibrate(runs: Sequence[RunRecord], device: Device, *, over: Map = map) -> Calibration:
    """Return what calibration runs say. ValueError without a resident one among them."""
    given = [complete(run) for run in runs if run.key.seed == CALIBRATION_SEED]
    resident = [run for run in given if run.key.system == RESIDENT_SYSTEM]
    copying = [run for run in given if run.key.system in COPYING_SYSTEMS]
    return with_copies(calibrated(device, resident), device, copying, over=over)


def compare(run: RunRecord, device: Device, calibration: Calibration) -> Row:
    """Return one run's errors."""
    real = complete(run)
    ours = [replayed(run, device, calibration, seed=seed) for seed in range(NUM_SEEDS)]
    found = errors(real, ours)
    return {
        **asdict(run.key),
        "held_out": run.key.seed != CALIBRATION_SEED,
        "num_requests": len(real.requests),
        "num_pauses": run.sums.get("kv_num_pauses", 0.0),
        "num_simulated_pauses": fmean(one.sums["num_pauses"] for one in ours),
        "errors": found,
        "misses": missed(found),
    }


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Return the table in percent, held-out runs first, their medians below."""
    lines = [["run", *SHOWN, "pauses", "beyond its bar"]]
    for row in sorted(rows, key=lambda row: not row["held_out"]):
        key = RunKey(system=row["system"], seed=row["seed"], slo_scale=row["slo_scale"])
        name = key.name if row["held_out"] else f"({key.name})"
        values = [f"{100 * row['errors'][shown]:.1f}" for shown in SHOWN]
        pauses = f"{row['num_simulated_pauses']:.0f} / {row['num_pauses']:.0f}"
        lines.append([name, *values, pauses, ", ".join(row["misses"]) or "-"])
    held_out = [row for row in rows if row["held_out"]]
    if held_out:
        middles = [median(abs(row["errors"][shown]) for row in held_out) for shown in SHOWN]
        num_within = sum(not row["misses"] for row in held_out)
        name = f"median of {len(held_out)} held out, without signs"
        values = [f"{100 * middle:.1f}" for middle in middles]
        lines.append([name, *values, "", f"{num_within} within all bars"])
    return lines


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path(".cache/bench/e2e"), help="of bench.e2e")
    parser.add_argument("--link-bytes-per-s", type=float, default=Device().link_bytes_per_s)
    parser.add_argument("--out", type=Path, default=Path(".cache/bench/fidelity.json"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
