"""Cells of a comparison: policy x arrival rate x SLO, each run by itself."""

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from services.pacing.types import ServiceLevel
from services.placement.presets import preset_of
from services.placement.run.papers.ellm import EllmRules
from services.placement.run.papers.tokenflow import TokenflowRules
from services.placement.types import PolicyParameters
from simulator.comparison.link_ratio import workload_link_ratio
from simulator.compose import run_policy
from simulator.deployment import Deployment
from simulator.engine.planning import PlanningOptions
from simulator.engine.records import RunRecord
from simulator.engine.vllm import VllmOptions
from simulator.measured import MeasuredDeployment
from simulator.report import steps
from simulator.report.figures import figures
from simulator.report.views import view_of
from simulator.traces import at_rate, mean_rate_per_s
from simulator.workload import (
    ArrivingRequest,
    Lengths,
    as_conversations,
    burst_gaps,
    drawn_requests,
    gamma_gaps,
    with_less_urgent,
    with_level,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How requests arrive, besides their rate."""

    cv: float = 1.0  # coefficient of variation of the gaps, > 0; 1: Poisson
    burst: int = 0  # requests at once; 0: none
    num_turns: int = 1  # of a conversation; its first one arrives, >= 1
    turn_gap_s: float = 60.0  # between a conversation's messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What arrives: a trace, or draws from length distributions."""

    lengths: tuple[Lengths, Lengths] | None = None  # prompt, output; None: a trace
    trace: tuple[ArrivingRequest, ...] = ()
    num_requests: int = 60
    arrivals: Arrivals = field(default_factory=Arrivals)
    less_urgent_frac: float = 0.0  # share of priority 1; 0: all have their own

    @property
    def own_rate_per_s(self) -> float | None:
        """Return the mean rate of a trace, as it was recorded; None: it is no trace."""
        return mean_rate_per_s(self.trace) if self.trace else None

    def name(self, path: Path | None) -> str:
        """Say in words what arrives; `path`: of the trace."""
        if self.lengths is None:
            return f"{len(self.trace)} requests of {path.name if path else 'drawn sessions'}"
        prompt, output = self.lengths
        arrivals = self.arrivals
        turns = f", {arrivals.num_turns} turns" if arrivals.num_turns > 1 else ""
        how = f"bursts of {arrivals.burst}" if arrivals.burst else f"gaps with CV {arrivals.cv:g}"
        means = f"{prompt.mean:g} prompt and {output.mean:g} output tokens on average"
        return f"{self.num_requests} requests, {means}, {how}{turns}"

    def requests(
        self, *, rate_per_s: float, seed: int, level: ServiceLevel
    ) -> list[ArrivingRequest]:
        """Return the requests; gaps of a trace are stretched or shrunk to the rate."""
        requests = self._requests(rate_per_s=rate_per_s, seed=seed, level=level)
        frac = self.less_urgent_frac
        return with_less_urgent(requests, frac, seed) if frac else requests

    def _requests(
        self, *, rate_per_s: float, seed: int, level: ServiceLevel
    ) -> list[ArrivingRequest]:
        if self.lengths is None:
            return with_level(at_rate(list(self.trace), rate_per_s), level)
        if self.arrivals.burst:
            gaps_s = burst_gaps(rate_per_s=rate_per_s, size=self.arrivals.burst)
        else:
            rng = random.Random(f"arrivals-{seed}")
            gaps_s = gamma_gaps(rng, rate_per_s=rate_per_s, cv=self.arrivals.cv)
        drawn = drawn_requests(
            gaps_s, self.lengths, num_requests=self.num_requests, seed=seed, level=level
        )
        arrivals = self.arrivals
        if arrivals.num_turns == 1:
            return drawn
        return as_conversations(drawn, num_turns=arrivals.num_turns, gap_s=arrivals.turn_gap_s)


OF_ONE_RATE = ("tbt_deposit", "tpot_deposit", "rebuffering")  # where readers state several


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What a cell leaves behind."""

    figures: dict[str, float]  # see `simulator.report.figures.DEFINITIONS`
    view: dict[str, Any]  # see `simulator.report.views`
    cpu_s: float  # that the run took


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run."""

    deployment: Deployment | MeasuredDeployment
    workload: Workload
    policy: str
    rate_per_s: float
    slo_tbt_s: float
    slo_scale: float | None = None  # x base SLO; None: the SLO is absolute
    seed: int = 0
    label: str = ""  # of the policy in reports; empty: its name
    parameters: PolicyParameters = field(default_factory=PolicyParameters)
    slo_ttft_s: float | None = None
    rates_tps: tuple[float, ...] = ()  # of readers, in turn; their SLO is 1 / rate, not slo_tbt_s
    num_timelines: int = 0  # in the view: see `view_of`
    tokenflow: TokenflowRules = field(default_factory=TokenflowRules)
    ellm: EllmRules = field(default_factory=EllmRules)
    prefix_caching: bool = True
    fairness_half_life_s: float = 0.0  # under policies that know shares; 0: ids have none
    vllm: VllmOptions = field(default_factory=VllmOptions)

    @property
    def name(self) -> str:
        return self.label or self.policy

    def requests(self) -> list[ArrivingRequest]:
        """Return what arrives, with its SLOs."""
        level = ServiceLevel(
            slo_ttft_s=self.slo_ttft_s, slo_tbt_s=self.slo_tbt_s, slo_tpot_s=self.slo_tbt_s
        )
        given = self.workload.requests(rate_per_s=self.rate_per_s, seed=self.seed, level=level)
        if not self.rates_tps:
            return given
        levels = [
            replace(level, slo_tbt_s=1.0 / rate, slo_tpot_s=1.0 / rate) for rate in self.rates_tps
        ]
        turns = itertools.cycle(levels)
        return [replace(one, level=own) for one, own in zip(given, turns, strict=False)]

    @property
    def asked(self) -> "Cell":
        """Return the cell without what its run does not depend on: equal ones have one run."""
        if self.rates_tps or not preset_of(self.policy).is_slo_blind:
            return self
        return replace(self, slo_tbt_s=0.0, slo_ttft_s=None, slo_scale=None)

    def run(self) -> CellResult:
        """Run it. Only `cpu_s` depends on the machine that runs it."""
        (result,) = run_alike([self])
        return result

    def simulated(self) -> RunRecord:
        """Return what the run leaves behind."""
        options = PlanningOptions(
            policy=self.policy,
            parameters=self.parameters,
            seed=self.seed,
            tokenflow=self.tokenflow,
            ellm=self.ellm,
            prefix_caching=self.prefix_caching,
            fairness_half_life_s=self.fairness_half_life_s,
            vllm=self.vllm,
        )
        return run_policy(self.deployment, self.requests(), options, seed=self.seed)

    def result(self, record: RunRecord, *, cpu_s: float) -> CellResult:
        """Return the figures of a run by this cell's SLOs."""
        requests = self.requests()
        levels = {one.request_id: one.level for one in requests}
        outcomes = [replace(one, level=levels[one.request_id]) for one in record.outcomes]
        record = replace(record, outcomes=tuple(outcomes))
        found = figures(record)
        if requests:
            shape, machine = self.deployment.shape(), self.deployment.machine()
            found["lambda"] = workload_link_ratio(shape, machine, requests)
            found |= steps.figures(record, requests, shape.block_size)
        for rate in set(self.rates_tps):
            alike = [one for one in record.outcomes if one.level.slo_tbt_s == 1.0 / rate]
            own = figures(replace(record, outcomes=tuple(alike)))
            found |= {f"{name} at {rate:g}/s": own[name] for name in OF_ONE_RATE}
        view = view_of(record, num_timelines=self.num_timelines)
        return CellResult(figures=found, view=view, cpu_s=cpu_s)

    def row(self, result: CellResult) -> dict[str, Any]:
        """Return what identifies the cell, and its figures."""
        return {
            "policy": self.name,
            "rate_per_s": self.rate_per_s,
            "slo_tbt_s": self.slo_tbt_s,
            "slo_scale": self.slo_scale,
            "seed": self.seed,
            **result.figures,
        }


def run_alike(cells: Sequence[Cell]) -> list[CellResult]:
    """Run cells that are `asked` the same once; each has its share of `cpu_s`."""
    began_s = time.process_time()
    record = cells[0].simulated()
    cpu_s = (time.process_time() - began_s) / len(cells)
    return [cell.result(record, cpu_s=cpu_s) for cell in cells]
