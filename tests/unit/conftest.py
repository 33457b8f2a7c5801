"""Unit tests are quick: two seconds of an idle processor are too many for one.

A processor that other work shares, or a slow one, takes longer for the same: what a test took is
held against what a fixed piece of work takes beside it. Where many processes want few processors,
caches are shared as well, and nothing is said. Tests that run at night only may be slow.
"""

import os
import time
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st

from tests.fuzz import TIMES

MAX_CPU_S = 2.0 * TIMES
MOST_LOAD = 2.0  # processes that run or wait, per processor
YARDSTICK_LOOPS, YARDSTICK_S = 2_000_000, 0.1  # an idle processor of 2020


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before_s = time.process_time()
    yield
    spent_s = time.process_time() - before_s
    if item.get_closest_marker("nightly") or os.getloadavg()[0] > MOST_LOAD * (os.cpu_count() or 1):
        return
    if spent_s > MAX_CPU_S and (idle_s := spent_s / slowness()) > MAX_CPU_S:
        pytest.fail(f"takes {idle_s:.1f} s of an idle processor; a unit test has {MAX_CPU_S:g}")


def slowness() -> float:
    """Return how many times as long as on an idle processor work takes now, 1 at least."""
    before_s = time.process_time()
    for number in range(YARDSTICK_LOOPS):
        number * number % 7
    return max((time.process_time() - before_s) / YARDSTICK_S, 1.0)


@pytest.fixture(scope="session", autouse=True)
def characters() -> None:
    """Have Hypothesis make its table of characters: no test's own time."""
    st.text().validate()
