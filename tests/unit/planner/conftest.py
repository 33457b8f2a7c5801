"""Tests here make plans, and compare some with the best of all."""

import numpy as np
import pytest

from lab.planning.exhaustive import exhaustive
from services.placement.step_time.patterns import PatternSpace
from services.planner.solver.library import pattern_library
from tests.kernels import compile_kernels
from tests.unit.planner.small_instances import small_instance


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    """Compile the planner's kernels and the tests' own: no test's own time."""
    compile_kernels()
    library = pattern_library(5, PatternSpace.FULL)
    instance = small_instance(np.random.default_rng(0), library, 1)
    exhaustive(instance, library)
