"""`python -m bench.failover [NAME ...] [--out DIR]`: measure, write JSON, print Markdown.

`python -m bench.failover campaign --requests N --faults N --seed S` is for hours: `--help` says
more.
"""

import sys

from bench.document import measure_named
from bench.failover import again, back, campaign, deaths, rolling, survivors

BENCHMARKS = tuple(one.BENCHMARK for one in (deaths, rolling, survivors, back, again))

if __name__ == "__main__":
    if sys.argv[1:2] == ["campaign"]:
        sys.exit(campaign.main(sys.argv[2:]))
    measure_named(
        {one.name: lambda one=one: one for one in BENCHMARKS},  # type: ignore[misc]
        prefix="failover",
        description=__doc__,
    )
