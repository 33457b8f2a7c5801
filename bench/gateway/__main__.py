"""`python -m bench.gateway [--out DIR] [NAME ...]`: measure, write JSON, print Markdown."""

import importlib
from functools import partial

from bench.document import Benchmark, measure_named

# Imported one by one: vLLM stays out of a process that measures something else.
MODULES = {
    "streams": "streams",
    "half-open": "half_open",
    "large-chats": "large_chats",
    "thinking": "thinking",
    "routing": "routing",
    "links": "links",
    "fleet": "fleet",
    "tracker": "tracker_reports",
    "vllm": "vllm_server",
}


def load(module: str) -> Benchmark:
    benchmark: Benchmark = importlib.import_module(f"bench.gateway.{module}").BENCHMARK
    return benchmark


if __name__ == "__main__":
    benchmarks = {name: partial(load, module) for name, module in MODULES.items()}
    measure_named(benchmarks, prefix="gateway", description=__doc__)
