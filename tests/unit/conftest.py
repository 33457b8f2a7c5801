"""Unit tests are quick: two seconds of the processor are too many for one."""

import time
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st

from tests.fuzz import TIMES

MAX_CPU_S = 2.0 * TIMES  # of the processor: what other work on the machine takes does not count


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    before_s = time.process_time()
    yield
    spent_s = time.process_time() - before_s
    if spent_s > MAX_CPU_S:
        pytest.fail(f"took {spent_s:.1f} s of the processor; a unit test has {MAX_CPU_S:g}")


@pytest.fixture(scope="session", autouse=True)
def characters() -> None:
    """Have Hypothesis make its table of characters: no test's own time."""
    st.text().validate()
