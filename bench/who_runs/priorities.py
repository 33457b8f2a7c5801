"""`python -m bench.who_runs.priorities`: what requests of two priorities get, in virtual time.

The same requests under `vllm`, under `evenflow` with one priority, and with two: half of them,
drawn one by one, are less urgent.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.who_runs.cases import as_shipped
from services.pacing.types import NO_SERVICE_LEVEL
from services.placement.run.reader_capacity import READING_RATE_TPS
from simulator.comparison.grid import Workload
from simulator.comparison.link_ratio import workload_link_ratio
from simulator.compose import run_policy
from simulator.deployment import Deployment
from simulator.engine.planning import PlanningOptions
from simulator.engine.records import Outcome
from simulator.workload import ArrivingRequest, constant_length

NUM_REQUESTS = 60
LESS_URGENT_FRAC = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """A deployment, and what arrives."""

    model: str
    device: str
    num_prompt_tokens: int
    num_output_tokens: int
    rate_per_s: float

    @property
    def deployment(self) -> Deployment:
        return as_shipped(self.model, self.device)

    def requests(self, seed: int) -> list[ArrivingRequest]:
        lengths = constant_length(self.num_prompt_tokens), constant_length(self.num_output_tokens)
        workload = Workload(
            lengths=lengths, num_requests=NUM_REQUESTS, less_urgent_frac=LESS_URGENT_FRAC
        )
        level = replace(NO_SERVICE_LEVEL, consumption_rate_tps=READING_RATE_TPS)
        return workload.requests(rate_per_s=self.rate_per_s, seed=seed, level=level)


REGIMES = (
    Regime(
        model="llama-3-8b",
        device="rtx-4090",
        num_prompt_tokens=8_000,
        num_output_tokens=300,
        rate_per_s=0.4,
    ),
    Regime(
        model="llama-3-8b",
        device="h100",
        num_prompt_tokens=24_000,
        num_output_tokens=800,
        rate_per_s=0.8,
    ),
)


def ttfts_s(outcomes: Sequence[Outcome]) -> list[float]:
    return [one.generated_s[0] - one.arrival_s for one in outcomes if one.generated_s]


def tokens_per_s(outcomes: Sequence[Outcome]) -> float:
    """Return their tokens by the time from the first arrival to the last token of all of them."""
    end_s = max(one.generated_s[-1] for one in outcomes)
    num_tokens = sum(len(one.generated_s) for one in outcomes)
    return num_tokens / (end_s - min(one.arrival_s for one in outcomes))


def measured(regime: Regime, policy: str, *, two: bool, seeds: int) -> list[str]:
    """Return a row: first tokens of the urgent and of the others, and tokens per second of all."""
    cells: dict[str, list[float]] = {"urgent": [], "others": []}
    speeds = []
    for seed in range(seeds):
        asked = regime.requests(seed)
        urgent = {one.request_id for one in asked if not one.priority}
        given = asked if two else [replace(one, priority=0) for one in asked]
        record = run_policy(regime.deployment, given, PlanningOptions(policy=policy), seed=seed)
        speeds.append(tokens_per_s(record.outcomes))
        for name in cells:
            ours = [o for o in record.outcomes if (o.request_id in urgent) is (name == "urgent")]
            cells[name] += ttfts_s(ours)
    quantiles = [statistics.quantiles(times, n=20) for times in cells.values()]
    ttfts = [f"{deciles[9]:.2f} / {deciles[18]:.2f}" for deciles in quantiles]
    return [*ttfts, f"{statistics.mean(speeds):.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    print("| regime | lambda | requests under | urgent: TTFT P50 / P95, s | others | tokens/s |")
    print("|---|---|---|---|---|---|")
    for regime in REGIMES:
        on = regime.deployment
        ratio = workload_link_ratio(on.shape(), on.machine(), regime.requests(0))
        name = f"{regime.model}, {regime.device}, {regime.num_prompt_tokens} + "
        name += f"{regime.num_output_tokens}, {regime.rate_per_s}/s"
        for policy, two in (("vllm", False), ("evenflow", False), ("evenflow", True)):
            row = measured(regime, policy, two=two, seeds=seeds)
            label = f"`{policy}`, {'two priorities' if two else 'one priority'}"
            print(f"| {name} | {100 * ratio:.1f} % | {label} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
