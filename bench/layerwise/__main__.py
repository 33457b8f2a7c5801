"""`python -m bench.layerwise [--out DIR] [--page PAGE] [--print] [NAME ...]`: measure, or print.

`--print` takes what was measured before.
"""

import argparse
import json
import os
from pathlib import Path

from bench.document import (
    add_page_option,
    document,
    expect_tables,
    markdown,
    save,
    write_table,
)
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
        content = json.loads(path.read_text())
        print(markdown(benchmark, content), flush=True)
        if options.page:
            write_table(options.page, name, content, benchmark.table(content["rows"]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--out", type=Path, default=Path(".cache/bench"), help="JSON goes here")
    parser.add_argument("--print", action="store_true", help="Markdown of what was measured before")
    add_page_option(parser)
    options = parser.parse_args()
    if unknown := set(options.names) - BENCHMARKS.keys():
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}")
    expect_tables(options.page, options.names or BENCHMARKS, parser)
    return options


if __name__ == "__main__":
    main()
