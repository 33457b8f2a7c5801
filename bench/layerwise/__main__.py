"""`python -m bench.layerwise [--out DIR] [--print] [NAME ...]`: measure, or print what is there."""

import argparse
import json
import os
from pathlib import Path

from bench.document import document, markdown, save
from bench.layerwise import capacity, overhead, overlap

BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (overhead.BENCHMARK, capacity.BENCHMARK, overlap.BENCHMARK)
}


def main() -> None:
    options = _options()
    for name in options.names or BENCHMARKS:
        benchmark = BENCHMARKS[name]
        path = options.out / f"layerwise-{name}.json"
        if not options.print:
            load = os.getloadavg()
            save(document(benchmark, benchmark.measure(), load), path)
        print(markdown(benchmark, json.loads(path.read_text())), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--out", type=Path, default=Path(".cache/bench"), help="JSON goes here")
    parser.add_argument("--print", action="store_true", help="Markdown of what was measured before")
    options = parser.parse_args()
    if unknown := set(options.names) - BENCHMARKS.keys():
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}")
    return options


if __name__ == "__main__":
    main()
