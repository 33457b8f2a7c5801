"""Tests here make plans."""

import pytest

from tests.kernels import compile_kernels


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    """Compile the planner's kernels: no test's own time."""
    compile_kernels()
