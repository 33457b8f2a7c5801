"""Time sources. Code that reads a clock takes one as an argument, so that tests hold it still."""

import time
from collections.abc import Callable
from typing import TypeAlias

# Returns seconds. Only differences mean anything unless a docstring says otherwise.
Clock: TypeAlias = Callable[[], float]

monotonic_s: Clock = time.monotonic
wall_s: Clock = time.time


def process_epoch() -> int:
    """Return a writer epoch: microseconds since 1970, greater for every later process."""
    return time.time_ns() // 1_000
