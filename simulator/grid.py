"""Cells of a comparison: policy x arrival rate x SLO, each run by itself."""

import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from services.pacing.types import ServiceLevel
from services.placement.types import PolicyParameters
from simulator.compose import run_policy
from simulator.deployment import Deployment
from simulator.figures import figures
from simulator.planning import PlanningOptions
from simulator.workload import (
    ArrivingRequest,
    Lengths,
    burst_gaps,
    drawn_requests,
    gamma_gaps,
    with_level,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How requests arrive, besides their rate."""

    cv: float = 1.0  # coefficient of variation of the gaps, > 0; 1: Poisson
    burst: int = 0  # requests at once; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What arrives: a trace, or draws from length distributions."""

    lengths: tuple[Lengths, Lengths] | None = None  # prompt, output; None: a trace
    trace: tuple[ArrivingRequest, ...] = ()
    num_requests: int = 60
    arrivals: Arrivals = field(default_factory=Arrivals)

    def requests(
        self, *, rate_per_s: float, seed: int, level: ServiceLevel
    ) -> list[ArrivingRequest]:
        """Return the requests; a trace keeps its own arrivals."""
        if self.lengths is None:
            return with_level(self.trace, level)
        if self.arrivals.burst:
            gaps_s = burst_gaps(rate_per_s=rate_per_s, size=self.arrivals.burst)
        else:
            rng = random.Random(f"arrivals-{seed}")
            gaps_s = gamma_gaps(rng, rate_per_s=rate_per_s, cv=self.arrivals.cv)
        return drawn_requests(
            gaps_s, self.lengths, num_requests=self.num_requests, seed=seed, level=level
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run."""

    deployment: Deployment
    workload: Workload
    policy: str
    rate_per_s: float  # of drawn requests
    slo_tbt_s: float
    seed: int = 0
    parameters: PolicyParameters = field(default_factory=PolicyParameters)

    def run(self) -> dict[str, float | str]:
        """Return what identifies the cell, and its figures."""
        level = ServiceLevel(slo_tbt_s=self.slo_tbt_s, slo_tpot_s=self.slo_tbt_s)
        requests = self.workload.requests(rate_per_s=self.rate_per_s, seed=self.seed, level=level)
        options = PlanningOptions(policy=self.policy, parameters=self.parameters, seed=self.seed)
        record = run_policy(self.deployment, requests, options, seed=self.seed)
        return {
            "policy": self.policy,
            "rate_per_s": self.rate_per_s,
            "slo_tbt_s": self.slo_tbt_s,
            "seed": self.seed,
            **figures(record),
        }


def run_cells(cells: Sequence[Cell], *, jobs: int = 1) -> list[dict[str, float | str]]:
    """Run cells in their order, `jobs` at a time; what they answer does not depend on `jobs`."""
    if jobs <= 1:
        return [cell.run() for cell in cells]
    with ProcessPoolExecutor(max_workers=jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(Cell.run, cells))
