"""`python -m bench.e2e.reading`: readers at reading speed, Evenflow in turn with stock vLLM.

Each finished run is a file in the folder of `--out`; a run whose file is there is not repeated, and
what the engine takes beside its layers is measured once.
"""

import argparse
import asyncio
import os
from itertools import product
from pathlib import Path

from grpc import aio

from bench.document import Benchmark, document, markdown
from bench.document import save as save_document
from bench.e2e.reading.figures import (
    DEFINITIONS,
    Run,
    RunKey,
    load,
    rows_of,
    save,
    table,
    verdicts,
)
from bench.e2e.reading.rows import Place, Row
from bench.e2e.records import RunKey as CalibrationKey
from bench.e2e.records import RunRecord
from bench.e2e.replay import RunError, replay, warm
from bench.e2e.stack import executor, grown, metric_sums, planner, utc_now
from bench.e2e.systems import RESIDENT, SYSTEMS, is_resident
from bench.fidelity.machine import calibrated

CALIBRATES = "vllm"
COMPARED = ("vllm", "evenflow", "vllm@0.02", "vllm@0.05")


def main() -> None:
    options, load_before = _options(), os.getloadavg()
    out: Path = options.out
    (out / "runs").mkdir(parents=True, exist_ok=True)
    with planner(out / "planner.log") as address:
        place = Place(outside_s=_kept_outside_s(address, out))
        print(
            f"step of a full pool {place.step_s * 1e3:.1f} ms, readers {place.rate_tps:.2f} "
            f"tokens/s, load 1 {place.capacity.requests_per_s:.3f} requests/s",
            flush=True,
        )
        for key in _keys(options):
            path = out / "runs" / f"{key.name}.json"
            if not path.exists():
                try:
                    save(_run(key, place, address, out), path)
                except (RunError, aio.AioRpcError) as error:
                    print(f"{key.name}: no figures, see {out}: {error}", flush=True)
    rows = rows_of([load(path) for path in sorted((out / "runs").glob("*.json"))])
    benchmark = Benchmark(
        name="e2e-reading",
        title="Readers at reading speed, on the engine",
        definitions=DEFINITIONS,
        measure=lambda: rows,
        table=table,
        verdicts=verdicts,
    )
    content = document(benchmark, rows, load_before) | {"step_s": place.step_s}
    save_document(content, out / "report.json")
    print(markdown(benchmark, content))


def _keys(options: argparse.Namespace) -> list[RunKey]:
    """Return the runs in the order in which they are made: systems take turns."""
    return [
        RunKey(row=Row(row), system=system, seed=seed, link_frac=link_frac)
        for seed, row in product(range(1, options.seeds + 1), options.rows)
        for system in options.systems
        for link_frac in ((0.0,) if is_resident(system) else options.lambdas)
    ]


def _kept_outside_s(planner_address: str, folder: Path) -> float:
    path = folder / "outside_s"
    if not path.exists():
        path.write_text(f"{_outside_s(planner_address, folder)}\n")
    return float(path.read_text())


def _outside_s(planner_address: str, folder: Path) -> float:
    """Return what steps take outside the layers, while the pool is nearly full."""
    place, log_path = Place(outside_s=0.0), folder / "executor.log"
    with executor(
        place.room, RESIDENT, planner_address=planner_address, log_path=log_path
    ) as process:
        asyncio.run(warm(process.address, place.warm_up()))
        requests = asyncio.run(replay(process.address, place.warm_up())).requests
    key = CalibrationKey(system=CALIBRATES, seed=1, slo_scale=1.0)
    run = RunRecord(key=key, slo_s=1.0, requests=tuple(requests), samples=())
    return calibrated(place.room, [run]).outside_s


def _run(key: RunKey, place: Place, planner_address: str, folder: Path) -> Run:
    """Start a system anew, warm it up, replay the row's requests."""
    device = place.device(key.link_frac) if key.link_frac else place.room
    log_path = folder / f"executor-{key.name}.log"
    with executor(
        device, SYSTEMS[key.system], planner_address=planner_address, log_path=log_path
    ) as process:
        asyncio.run(warm(process.address, place.warm_up()))
        before, started = metric_sums(process), utc_now()
        requests = asyncio.run(replay(process.address, place.trace(key.row, key.seed))).requests
        sums = grown(before, metric_sums(process))
    whole = [r for r in requests if not r.failure]
    if not whole:
        raise RunError(f"all requests failed: {requests[0].failure}")
    seconds = max(r.generated_s[-1] for r in whole)
    print(f"{key.name}: {seconds:.0f} s, {len(requests) - len(whole)} failures", flush=True)
    return Run(
        key=key, requests=tuple(requests), sums=sums, started=started, load=os.getloadavg()[0]
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".cache/bench/e2e-reading"))
    parser.add_argument("--rows", nargs="+", choices=list(Row), default=list(Row))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(COMPARED))
    parser.add_argument("--lambdas", nargs="+", type=float, default=[0.03, 0.16])
    parser.add_argument("--seeds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
