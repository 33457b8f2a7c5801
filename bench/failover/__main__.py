"""`python -m bench.failover [--out DIR]`: measure, write JSON, print Markdown."""

from bench.document import measure_named
from bench.failover.deaths import BENCHMARK

if __name__ == "__main__":
    measure_named({BENCHMARK.name: lambda: BENCHMARK}, prefix="failover", description=__doc__)
