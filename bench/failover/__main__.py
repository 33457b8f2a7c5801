"""`python -m bench.failover [--out DIR] [NAME ...]`: measure, write JSON, print Markdown."""

import importlib
from functools import partial

from bench.document import Benchmark, measure_named

MODULES = {"deaths": "deaths"}


def load(module: str) -> Benchmark:
    benchmark: Benchmark = importlib.import_module(f"bench.failover.{module}").BENCHMARK
    return benchmark


if __name__ == "__main__":
    benchmarks = {name: partial(load, module) for name, module in MODULES.items()}
    measure_named(benchmarks, prefix="failover", description=__doc__)
