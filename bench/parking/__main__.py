"""`python -m bench.parking [--out DIR] [NAME ...]`: measure, write JSON, print Markdown."""

import argparse
import os
from pathlib import Path

from bench.document import document, markdown, save
from bench.parking import ablation, costs

BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (costs.TRIPS, costs.WRITE_THROUGH, ablation.BENCHMARK)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--out", type=Path, default=Path(".cache/bench"), help="JSON goes here")
    options = parser.parse_args()
    if unknown := set(options.names) - BENCHMARKS.keys():
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}")
    for name in options.names or BENCHMARKS:
        benchmark = BENCHMARKS[name]
        load = os.getloadavg()
        content = document(benchmark, benchmark.measure(), load)
        save(content, options.out / f"parking-{name}.json")
        print(markdown(benchmark, content), flush=True)


if __name__ == "__main__":
    main()
