"""`python -m bench.failover [NAME ...] [--out DIR]`: measure, write JSON, print Markdown."""

from bench.document import measure_named
from bench.failover import back, deaths

BENCHMARKS = (deaths.BENCHMARK, back.BENCHMARK)

if __name__ == "__main__":
    measure_named(
        {one.name: lambda one=one: one for one in BENCHMARKS},  # type: ignore[misc]
        prefix="failover",
        description=__doc__,
    )
