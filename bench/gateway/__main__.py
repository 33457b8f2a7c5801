"""`python -m bench.gateway [--out DIR] [NAME ...]`: measure, write JSON, print Markdown."""

import argparse
import importlib
import os
from pathlib import Path

from bench.document import document, markdown, save

# Imported one by one: vLLM stays out of a process that measures something else.
MODULES = {"streams": "streams", "tracker": "tracker_reports", "vllm": "vllm_server"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODULES)}")
    parser.add_argument("--out", type=Path, default=Path(".cache/bench"), help="JSON goes here")
    options = parser.parse_args()
    if unknown := set(options.names) - MODULES.keys():
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}")
    for name in options.names or MODULES:
        benchmark = importlib.import_module(f"bench.gateway.{MODULES[name]}").BENCHMARK
        load = os.getloadavg()
        content = document(benchmark, benchmark.measure(), load)
        save(content, options.out / f"gateway-{name}.json")
        print(markdown(benchmark, content), flush=True)


if __name__ == "__main__":
    main()
