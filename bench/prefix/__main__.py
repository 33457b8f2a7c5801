"""`python -m bench.prefix [--out DIR] [NAME ...]`: measure, write JSON, print Markdown."""

from functools import partial

from bench.document import measure_named
from bench.prefix import chat

if __name__ == "__main__":
    benchmarks = {name: partial(chat.benchmark, name) for name in chat.SETTINGS}
    measure_named(benchmarks, prefix="prefix", description=__doc__)
