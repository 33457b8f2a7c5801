"""`python -m bench.failover [NAME] [--out DIR]`: measure, write JSON, print Markdown."""

from bench.document import measure_named
from bench.failover import again, deaths

BENCHMARKS = {
    deaths.BENCHMARK.name: lambda: deaths.BENCHMARK,
    again.BENCHMARK.name: lambda: again.BENCHMARK,
}

if __name__ == "__main__":
    measure_named(BENCHMARKS, prefix="failover", description=__doc__)
