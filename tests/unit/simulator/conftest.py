"""Tests here make plans, and pages."""

import pytest

from simulator.report.page import page
from tests.kernels import compile_kernels


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    """Compile the planner's kernels: no test's own time."""
    compile_kernels()


@pytest.fixture(scope="session", autouse=True)
def vega() -> None:
    """Bundle what pages carry with them: no test's own time."""
    page("", "", [])
