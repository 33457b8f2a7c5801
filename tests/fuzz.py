"""How long tests search for a counterexample.

On every commit briefly, and for the same examples each time: no draw fails a commit by chance. At
night `EVENFLOW_FUZZ_TIMES` times as long, with other examples every night.
"""

import os

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("EVENFLOW_FUZZ_TIMES", "1"))


def examples(count: int) -> int:
    """Return how many examples to try where a commit tries `count`."""
    return count * TIMES


def load_profile() -> None:
    """Make this the default of every test in this process."""
    settings.register_profile(
        "evenflow",
        deadline=None,
        database=None,
        derandomize=TIMES == 1,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],  # so is a busy machine
        max_examples=examples(100),
    )
    settings.load_profile("evenflow")
