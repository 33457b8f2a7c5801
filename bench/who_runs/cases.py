"""What policies are compared on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.placement.types import EngineShape
from simulator.engine.engine import Machine
from simulator.workload import ArrivingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One seed of a regime."""

    shape: EngineShape
    machine: Machine
    requests: Sequence[ArrivingRequest]
    counted_from_s: float = 0.0  # requests that arrive earlier warm the engine up
    report_interval_s: float = 0.0

    def with_host(self, frac: float) -> "Case":
        """Return the same with so much room on the host, of the pool."""
        shape = replace(self.shape, num_host_blocks=int(frac * self.shape.num_blocks))
        return replace(self, shape=shape)


Regime = Callable[[int], Case]
