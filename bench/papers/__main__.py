"""`python -m bench.papers`: OrbitFlow's figures in the simulator; writes HTML, JSON, Markdown.

`--quick` is small enough for two cores and ten minutes; its runs have fewer requests and seeds than
a figure that counts needs. Finished runs are kept beside the report and not repeated.
"""

import argparse
import os
import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from bench.document import save
from bench.papers.orbitflow import Point, Size, deployment, figures, recorded
from bench.papers.sections import Found, section, shows, speed
from simulator.cache import CellCache, cell_key, code_version
from simulator.figures import DEFINITIONS
from simulator.grid import CellResult
from simulator.report.page import Section, definitions, page, table
from simulator.sweep import progress_bar, sweep

QUICK = Size(num_requests=16, num_seeds=1, loads=(3.0, 5.0))
FULL = Size(num_requests=60, num_seeds=3)
INTRO = (
    "OrbitFlow (PVLDB 19(5), 2026), simulated: Llama-3-8B on one RTX A5000 behind PCI Express 3.0, "
    "four requests at a time, a pool of 9,776 tokens. Load 1 offers as many output tokens as one "
    "request alone decodes at the base SLO; lengths are drawn by the statistics of the artefact's "
    "traces. Absolute times are those of the assumptions in docs/simulator.md."
)


def main() -> None:
    options = _options()
    size = QUICK if options.quick else FULL
    size = replace(size, num_seeds=options.seeds or size.num_seeds)
    wanted = figures(size)
    for path in sorted(options.traces.glob("*.json")) if options.traces else ():
        try:
            wanted[path.name] = recorded(path, size)
        except (KeyError, ValueError) as error:
            print(f"{path.name}: left out, no trace: {error}")
    began_s, load = time.monotonic(), os.getloadavg()[0]
    found = _run(wanted, options.jobs, options.out / "runs")
    wall_s = time.monotonic() - began_s
    _write(found, options.out, {"quick": options.quick, "wall_s": wall_s, "load": load})


def _run(wanted: dict[str, list[Point]], jobs: int, folder: Path) -> Found:
    """Run every different cell once."""
    cells = {cell_key(p.cell): p.cell for points in wanted.values() for p in points}
    with progress_bar(len(cells), Console()) as finished:
        results = sweep(list(cells.values()), jobs=jobs, cache=CellCache(folder), finished=finished)
    by_key = dict(zip(cells, results, strict=True))
    return {
        name: [(point, by_key[cell_key(point.cell)]) for point in points]
        for name, points in wanted.items()
    }


def _write(found: Found, folder: Path, how: dict[str, object]) -> None:
    by_policy: dict[str, dict[str, CellResult]] = defaultdict(dict)
    for points in found.values():
        for point, result in points:
            by_policy[point.cell.policy][cell_key(point.cell)] = result
    heads, rows = speed({name: list(results.values()) for name, results in by_policy.items()})
    made = shows(found)
    text = "\n\n".join(one.markdown() for one in made)
    sections = [section(one) for one in made]
    sections.append(Section(title="Speed of the simulator", body=table(heads, rows)))
    html = page("OrbitFlow's figures, simulated", INTRO, [*sections, definitions(DEFINITIONS)])
    (folder / "orbitflow.html").write_text(html)
    (folder / "orbitflow.md").write_text(text + "\n")
    document = {
        **how,
        "code_version": code_version(),
        "definitions": DEFINITIONS,
        "deployment": asdict(deployment()),
        "speed": [dict(zip(heads, row, strict=True)) for row in rows],
        "figures": {
            name: [{"x": point.x, **point.cell.row(result)} for point, result in points]
            for name, points in found.items()
        },
    }
    save(document, folder / "orbitflow.json")
    print(text)
    print("\n".join("  ".join(f"{cell:>18}" for cell in row) for row in [heads, *rows]))
    print(f"{how['wall_s']:.0f} s; report in {folder / 'orbitflow.html'}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".cache/papers"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=0, help="of each point; 0: 1 if quick, else 3")
    parser.add_argument("--traces", type=Path, help="folder of OrbitFlow's recorded traces")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
