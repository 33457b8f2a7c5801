"""`python -m bench.prefix [--out DIR] [NAME ...]`: measure, write JSON, print Markdown."""

from functools import partial

from bench.document import measure_named
from bench.prefix import agents, chat, shared

if __name__ == "__main__":
    benchmarks = {
        name: partial(module.benchmark, name)
        for module in (chat, shared, agents)
        for name in module.SETTINGS
    }
    measure_named(benchmarks, prefix="prefix", description=__doc__)
