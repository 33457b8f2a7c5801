"""`python -m bench.e2e.reading`: readers at reading speed, Evenflow in turn with stock vLLM.

Each finished run is a file in the folder of `--out`; a run whose file is there is not repeated, and
what the engine takes beside its layers is measured once.
"""

import argparse
import os
from itertools import product
from pathlib import Path

from grpc import aio

from bench.document import (
    Benchmark,
    add_page_option,
    document,
    expect_tables,
    markdown,
    write_table,
)
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
from bench.e2e.reading.running import Engines
from bench.e2e.replay import RunError
from bench.e2e.stack import planner
from bench.e2e.systems import SYSTEMS, is_resident

NAME = "e2e-reading"
COMPARED = ("vllm", "evenflow", "vllm@0.02", "vllm@0.05")


def main() -> None:
    options, load_before = _options(), os.getloadavg()
    out: Path = options.out
    (out / "runs").mkdir(parents=True, exist_ok=True)
    with planner(out / "planner.log") as address:
        engines = Engines(planner_address=address, folder=out, more={})
        place = Place(outside_s=_kept_outside_s(engines))
        print(
            f"step of a full pool {place.step_s * 1e3:.1f} ms, readers {place.rate_tps:.2f} "
            f"tokens/s, load 1 {place.capacity.requests_per_s:.3f} requests/s",
            flush=True,
        )
        for key in _keys(options):
            path = out / "runs" / f"{key.name}.json"
            if not path.exists():
                try:
                    save(_run(key, place, engines), path)
                except (RunError, aio.AioRpcError) as error:
                    print(f"{key.name}: no figures, see {out}: {error}", flush=True)
    rows = rows_of([load(path) for path in sorted((out / "runs").glob("*.json"))])
    benchmark = Benchmark(
        name=NAME,
        title="Readers at reading speed, on the engine",
        definitions=DEFINITIONS,
        measure=lambda: rows,
        table=table,
        verdicts=verdicts,
    )
    content = document(benchmark, rows, load_before) | {"step_s": place.step_s}
    save_document(content, out / "report.json")
    print(markdown(benchmark, content))
    if options.page:
        write_table(options.page, NAME, content, table(rows))


def _keys(options: argparse.Namespace) -> list[RunKey]:
    """Return the runs in the order in which they are made: systems take turns."""
    return [
        RunKey(row=Row(row), system=system, seed=seed, link_frac=link_frac)
        for seed, row in product(range(1, options.seeds + 1), options.rows)
        for system in options.systems
        for link_frac in ((0.0,) if is_resident(system) else options.lambdas)
    ]


def _kept_outside_s(engines: Engines) -> float:
    path = engines.folder / "outside_s"
    if not path.exists():
        path.write_text(f"{engines.outside_s()}\n")
    return float(path.read_text())


def _run(key: RunKey, place: Place, engines: Engines) -> Run:
    device = place.device(key.link_frac) if key.link_frac else place.room
    trace = place.trace(key.row, key.seed)
    return engines.run(key, device, SYSTEMS[key.system], warm_up=place.warm_up(), trace=trace)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".cache/bench/e2e-reading"))
    parser.add_argument("--rows", nargs="+", choices=list(Row), default=list(Row))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(COMPARED))
    parser.add_argument("--lambdas", nargs="+", type=float, default=[0.03, 0.16])
    parser.add_argument("--seeds", type=int, default=3)
    add_page_option(parser)
    options = parser.parse_args()
    expect_tables(options.page, [NAME], parser)
    return options


if __name__ == "__main__":
    main()
