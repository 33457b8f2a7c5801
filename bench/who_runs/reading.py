"""Readers at reading speed: people read 5 tokens/s, which is less than an engine gives each.

Load 1 is what a deployment could serve at most, by arithmetic (`capacity.py`).
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

from bench.who_runs.capacity import Capacity, first_tokens
from bench.who_runs.cases import Case, Regime, deployed, lognormal, on_gpu
from services.pacing.types import NO_SERVICE_LEVEL, ServiceLevel
from simulator.deployment import Deployment
from simulator.engine.records import Outcome
from simulator.report.figures import quantile
from simulator.workload import ArrivingRequest, drawn_requests, gamma_gaps, with_leavers

NUM_REQUESTS = 120
RATES_TPS = (4, 5, 6, 8, 12, 20)
LOADS = (0.6, 0.8, 1.0, 1.3)
BURSTS = (2, 4)  # pools
SMALL_HOST = 0.25  # of what a burst's KV takes
BURST_GAP_S = 1e-3
LARGEST_ANSWER = 4_000
AGENT_LOADS = (0.9, 1.1)
LEAVING_AT = ("7B, H100, 9k", "8B, 4090, 2k")
LEAVING_LOADS = (1.0, 1.3, 1.6)
LEAVING_FRAC = 0.5
LEAVING_RATE_TPS = 5
PEOPLE = ServiceLevel(consumption_rate_tps=6.0, slo_ttft_s=2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A deployment, and the mean lengths of what it is asked."""

    deployment: Deployment
    num_prompt_tokens: int
    num_output_tokens: int

    def capacity(self) -> Capacity:
        return Capacity(
            shape=self.deployment.shape(),
            costs=self.deployment.machine().costs,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
        )

    def drawn(
        self, gaps_s: Iterable[float], seed: int, num_requests: int, level: ServiceLevel
    ) -> list[ArrivingRequest]:
        """Return requests of lognormal lengths, the same of a seed however they arrive."""
        answers = lognormal(self.num_output_tokens, largest=LARGEST_ANSWER)
        lengths = (lognormal(self.num_prompt_tokens), answers)
        return drawn_requests(gaps_s, lengths, num_requests=num_requests, seed=seed, level=level)

    def at_load(self, load: float, level: ServiceLevel) -> Regime:
        """Return bursty arrivals (gamma, cv 1.7) at a load."""

        def requests(seed: int) -> list[ArrivingRequest]:
            rate = load * self.capacity().requests_per_s
            gaps = gamma_gaps(random.Random(f"arrivals {seed}"), rate_per_s=rate, cv=1.7)
            return self.drawn(gaps, seed, NUM_REQUESTS, level)

        return on_gpu(self.deployment, requests)

    def burst(self, num_pools: int, rate_tps: float) -> Regime:
        """Return requests that fill the pool so many times, all at once."""
        level = ServiceLevel(consumption_rate_tps=rate_tps)
        num_requests = int(num_pools * self.capacity().num_held)

        def case(seed: int) -> Case:
            requests = self.drawn([BURST_GAP_S] * num_requests, seed, num_requests, level)
            capacity = replace(
                self.capacity(),
                num_prompt_tokens=fmean(one.num_prompt_tokens for one in requests),
                num_output_tokens=fmean(one.num_output_tokens for one in requests),
            )
            made = on_gpu(self.deployment, lambda seed: requests)(seed)
            return replace(made, fluid=first_tokens(capacity, requests, rate_tps))

        return case


def places() -> dict[str, Place]:
    """Return where people read, by name."""
    h100 = deployed("llama-2-7b", "h100", link="pcie4x16", max_num_seqs=512)
    return {
        name: Place(deployment=on, num_prompt_tokens=prompt, num_output_tokens=answer)
        for name, on, prompt, answer in (
            ("7B, H100, 9k", h100, 9_000, 600),
            ("8B, H100, 24k", deployed("llama-3-8b", "h100", max_num_seqs=512), 24_000, 800),
            ("8B, 4090, 2k", deployed("llama-3-8b", "rtx-4090", max_num_seqs=512), 2_000, 600),
            ("8B, A5000, 6k", deployed("llama-3-8b", "a5000", max_num_seqs=512), 6_000, 800),
        )
    }


def with_host(regime: Regime, frac: float) -> Regime:
    """Return a regime with so much room on the host, of the pool."""
    return lambda seed: regime(seed).with_host(frac)


def with_agents(regime: Regime) -> Regime:
    """Return a regime whose requests are people's or agents', one as likely as the other."""

    def case(seed: int) -> Case:
        rng, made = random.Random(f"people {seed}"), regime(seed)
        levels = (PEOPLE, NO_SERVICE_LEVEL)
        requests = [replace(one, level=rng.choice(levels)) for one in made.requests]
        return replace(made, requests=requests)

    return case


def half_leaving(regime: Regime) -> Regime:
    """Return a regime of whose readers half leave, each at a point of its own."""

    def case(seed: int) -> Case:
        made = regime(seed)
        return replace(made, requests=with_leavers(made.requests, LEAVING_FRAC, seed))

    return case


def regimes() -> dict[str, Regime]:
    """Return the regimes by name."""
    found: dict[str, Regime] = {}
    for name, place in places().items():
        for load in LOADS:
            for rate in RATES_TPS:
                level = ServiceLevel(consumption_rate_tps=float(rate))
                found[f"reading: {name}, load {load}, {rate}/s"] = place.at_load(load, level)
        for pools in BURSTS:
            for rate in RATES_TPS:
                burst = place.burst(pools, float(rate))
                found[f"reading: {name}, burst x{pools}, {rate}/s"] = burst
                small = with_host(burst, SMALL_HOST * pools)
                found[f"reading: {name}, small host, burst x{pools}, {rate}/s"] = small
        for load in AGENT_LOADS:
            mixed = with_agents(place.at_load(load, NO_SERVICE_LEVEL))
            found[f"reading: {name}, people and agents, load {load}"] = mixed
    level = ServiceLevel(consumption_rate_tps=float(LEAVING_RATE_TPS))
    for name, load in product(LEAVING_AT, LEAVING_LOADS):
        leaving = half_leaving(places()[name].at_load(load, level))
        found[f"reading: {name}, half leaving, load {load}, {LEAVING_RATE_TPS}/s"] = leaving
    return found


def figures_by_kind(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Return what people and agents have each; nothing unless both were served.

    People state a rate and a TTFT SLO, agents neither.
    """
    served = [one for one in outcomes if one.generated_s]
    people = [one for one in served if one.level.slo_ttft_s and one.level.consumption_rate_tps]
    agents = [one for one in served if one.level == NO_SERVICE_LEVEL]
    if not people or not agents:
        return {}
    return {
        **_first_tokens("people", people),
        "people_within_slo": fmean(_ttft_s(o) <= (o.level.slo_ttft_s or 0.0) for o in people),
        **_first_tokens("agents", agents),
        "agents_e2e_s": fmean(one.generated_s[-1] - one.arrival_s for one in agents),
        "agents_tokens_per_s": sum(len(one.generated_s) for one in agents)
        / (max(one.generated_s[-1] for one in agents) - min(one.arrival_s for one in agents)),
    }


def _first_tokens(kind: str, outcomes: Iterable[Outcome]) -> dict[str, float]:
    ttfts_s = sorted(map(_ttft_s, outcomes))
    quantiles = {f"{kind}_ttft_p{p}_s": quantile(ttfts_s, p / 100) for p in (50, 95, 99)}
    return {f"{kind}_ttft_s": fmean(ttfts_s), **quantiles}


def _ttft_s(outcome: Outcome) -> float:
    return outcome.generated_s[0] - outcome.arrival_s
