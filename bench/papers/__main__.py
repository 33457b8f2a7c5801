"""`python -m bench.papers`: the papers' figures in the simulator; writes HTML, JSON, Markdown.

`--quick` is small enough for two cores and ten minutes; its runs have fewer requests and seeds than
a figure that counts needs. Finished runs are kept beside the reports and not repeated.
"""

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from bench.document import circumstances, said, save
from bench.papers import (
    ellm,
    ellm_contradictions,
    layerkv,
    orbitflow,
    orbitflow_stated,
    tokenflow,
)
from bench.papers.cells import Figures, Found
from bench.papers.claims import CLAIMS, claims
from bench.papers.sections import Stated, section, speed
from lab.policies.presets import short_name
from simulator.comparison.cache import CellCache, cell_key, code_version
from simulator.comparison.grid import CellResult
from simulator.comparison.sweep import progress_bar, sweep
from simulator.report.figures import DEFINITIONS
from simulator.report.page import Section, definitions, page, table

# Each module has INTRO, QUICK and FULL, `figures` and `shows`.
PAPERS: Mapping[str, ModuleType] = {
    "orbitflow": orbitflow,
    "tokenflow": tokenflow,
    "layerkv": layerkv,
    "ellm": ellm,
}
STATED: Mapping[str, Callable[[], Sequence[Stated]]] = {
    "orbitflow": orbitflow_stated.stated,
    "ellm": ellm_contradictions.stated,
}


def main() -> None:
    options = _options()
    for name in options.papers:
        paper = PAPERS[name]
        size = paper.QUICK if options.quick else paper.FULL
        size = replace(size, num_seeds=options.seeds or size.num_seeds)
        wanted = dict(paper.figures(size))
        traces = options.traces.glob("*.json") if options.traces and name == "orbitflow" else ()
        for path in sorted(traces):
            try:
                wanted[path.name] = orbitflow.recorded(path, size)
            except (KeyError, ValueError) as error:
                print(f"{path.name}: left out, no trace: {error}")
        began_s, load = time.monotonic(), os.getloadavg()
        found = _run(wanted, options.jobs, options.out / "runs")
        wall_s = time.monotonic() - began_s
        how = {"quick": options.quick, "seeds": size.num_seeds, "wall_s": wall_s}
        _write(name, found, options.out, how | circumstances(load))


def _run(wanted: Figures, jobs: int, folder: Path) -> Found:
    """Run every different cell once."""
    cells = {cell_key(p.cell): p.cell for points in wanted.values() for p in points}
    with progress_bar(len(cells), Console()) as finished:
        results = sweep(list(cells.values()), jobs=jobs, cache=CellCache(folder), finished=finished)
    by_key = dict(zip(cells, results, strict=True))
    return {
        name: [(point, by_key[cell_key(point.cell)]) for point in points]
        for name, points in wanted.items()
    }


def _write(name: str, found: Found, folder: Path, how: dict[str, Any]) -> None:
    by_policy: dict[str, dict[str, CellResult]] = defaultdict(dict)
    for points in found.values():
        for point, result in points:
            by_policy[short_name(point.cell.policy)][cell_key(point.cell)] = result
    heads, rows = speed({policy: list(cells.values()) for policy, cells in by_policy.items()})
    made = PAPERS[name].shows(found)
    claimed = claims(found, CLAIMS[name])
    stated = STATED[name]() if name in STATED else ()
    made_by = f"{said(how)} Seeds: {how['seeds']}; {how['wall_s']:.0f} s, without what was kept."
    text = "\n\n".join([made_by, *(one.markdown() for one in (claimed, *made, *stated))])
    figures = [section(one) for one in made]
    sections = [claimed.section(), *figures, *(one.section() for one in stated)]
    sections.append(Section(title="Speed of the simulator", body=table(heads, rows)))
    title = f"The figures of {name}'s paper, simulated"
    html = page(title, f"{PAPERS[name].INTRO} {made_by}", [*sections, definitions(DEFINITIONS)])
    (folder / f"{name}.html").write_text(html)
    (folder / f"{name}.md").write_text(text + "\n")
    document = {
        **how,
        "code_version": code_version(),
        "definitions": DEFINITIONS,
        "speed": [dict(zip(heads, row, strict=True)) for row in rows],
        "figures": {
            figure: [
                {
                    "x": point.x,
                    "deployment": point.cell.deployment.title,
                    **point.cell.row(result),
                }
                for point, result in points
            ]
            for figure, points in found.items()
        },
    }
    save(document, folder / f"{name}.json")
    print(text)
    print("\n".join("  ".join(f"{cell:>18}" for cell in row) for row in [heads, *rows]))
    print(f"{how['wall_s']:.0f} s; report in {folder / name}.html")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("papers", nargs="*", default=list(PAPERS), metavar="PAPER")
    parser.add_argument("--out", type=Path, default=Path(".cache/papers"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=0, help="of each point; 0: 1 if quick, else 3")
    parser.add_argument("--traces", type=Path, help="folder of OrbitFlow's recorded traces")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if unknown := set(options.papers) - set(PAPERS):
        parser.error(f"{', '.join(sorted(unknown))}: one of {', '.join(PAPERS)}")
    return options


if __name__ == "__main__":
    main()
