"""Tests here make plans, and pages, as those of the simulator."""

from tests.unit.simulator.conftest import kernels, vega

__all__ = ["kernels", "vega"]
