"""`python -m bench.parking [--out DIR] [NAME ...]`: measure, write JSON, print Markdown."""

from bench.document import measure_named
from bench.parking import ablation, choices, costs

BENCHMARKS = (costs.TRIPS, costs.WRITE_THROUGH, choices.BENCHMARK, ablation.BENCHMARK)


if __name__ == "__main__":
    benchmarks = {b.name: lambda b=b: b for b in BENCHMARKS}
    measure_named(benchmarks, prefix="parking", description=__doc__)
